//! One test binary with one device: pipelines are compiled once.
mod attention_backward;
mod smoke;
