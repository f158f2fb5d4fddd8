//! Case files: `cargo +nightly fuzz run case fuzz/corpus/case tests/cases`.
#![no_main]
#![allow(dead_code)]

#[path = "../../tests/suite/fuzz/mod.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::case(data));
