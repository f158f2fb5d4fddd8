//! EFLA: exact and Euler steps, forward and backward, token by token. `cargo bench --bench efla`

mod shared;

use continuous_attention::Integrator;
use shared::rows::Side;
use shared::work::Pass;

fn main() {
    shared::bench("efla", |sizes| {
        let mut sides = Vec::new();
        for integrator in [Integrator::Exact, Integrator::Euler] {
            for pass in [Pass::Forward, Pass::Backward] {
                sides.push(Side::efla(sizes, integrator, pass));
            }
        }
        sides.extend([Side::recurrent(sizes), Side::step(sizes)]);
        sides
    });
}
