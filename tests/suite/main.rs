//! Everything the specification promises, seen through the public API and judged by the float64 reference.
//!
//! One binary with one shared device, so that a pipeline is compiled once. Every judged tensor prints an `accuracy`
//! line; `cargo test --test suite -- --nocapture | grep ^accuracy` lists them. `CONTINUOUS_ATTENTION_CASES` sets how
//! many random cases each operator gets.

mod harness;

mod attention_backward;
mod attention_merge;
mod attention_numerics;
mod attention_options;
mod causality;
mod composition;
mod configurations;
mod copy;
mod decoding;
mod devices;
mod efla_backward;
mod efla_gated;
mod efla_numerics;
mod efla_options;
mod errors;
mod faults;
mod fuzz;
mod fuzzing;
mod given;
mod matrix;
mod nan;
mod random;
mod rotary;
mod sizes;
