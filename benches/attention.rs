//! Attention, continuous and ordinary: forward, backward, decoding. `cargo bench --bench attention`

mod shared;

use continuous_attention::{DType, Method};
use shared::rows::Side;
use shared::work::Pass;

fn main() {
    shared::bench("attention", |sizes| {
        let mut sides = Vec::new();
        for method in [Method::Continuous, Method::Softmax] {
            for dim in [64, 128] {
                for pass in [Pass::Forward, Pass::Backward] {
                    sides.push(Side::attention(sizes, method, pass, dim, DType::F32));
                }
            }
            sides.push(Side::attention(sizes, method, Pass::Forward, 64, DType::F16));
            sides.push(Side::decode(sizes, method, DType::F32));
        }
        sides
    });
}
