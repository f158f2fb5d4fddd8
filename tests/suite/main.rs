//! One test binary with one device: pipelines are compiled once.
mod efla_backward;
mod smoke;
