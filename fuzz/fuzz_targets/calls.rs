//! Plans and calls of any sizes and views: `cargo +nightly fuzz run calls`. Needs an adapter; its memory is not fuzzed.
#![no_main]
#![allow(dead_code)]

#[path = "../../tests/suite/fuzz/mod.rs"]
mod fuzz;

use std::sync::LazyLock;

static GPU: LazyLock<continuous_attention::Gpu> =
    LazyLock::new(|| continuous_attention::Gpu::new().expect("a GPU, a software one will do"));

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::calls(&GPU, data));
