//! Some of the random configurations of [`crate::random`].

use crate::harness::{case_count, gpu};
use crate::random::{Case, RUN};

fn run(seed: u64) {
    let case = Case::draw(seed);
    let kind = case.kind();
    case.run(gpu(), &mut |judged| {
        let (rms, limit) = (judged.comparison.rms, judged.comparison.limit);
        let (tensor, dtype, label) = (judged.tensor, judged.dtype, judged.label);
        println!("accuracy {tensor} {dtype:?} rms/limit {:.4} rms {rms:.2e}: {kind}, {label}", rms / limit);
    });
}

/// Two seeds of every second run, from the given run on.
fn for_each_seed(count: usize, first: u64) {
    (0..case_count(count) as u64).for_each(|index| run((index / 2 * 2 + first) * RUN + index % 2));
}

#[test]
fn attention_of_every_kind() {
    for_each_seed(12, 0);
}

#[test]
fn efla_of_every_kind() {
    for_each_seed(10, 1);
}
