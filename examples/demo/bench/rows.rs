//! What is measured: two kernels a row, or one.

use super::work::{Kernel, Pass, Spec};
use continuous_attention::{DType, Form, Integrator, Method, wgpu};

/// A kernel under the name that its results have.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    pub name: String,
    pub spec: Spec,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// `a_over_b…`, or the kernel's own name.
    pub key: String,
    pub first: Side,
    /// None: the kernel alone.
    pub second: Option<Side>,
}

/// The sizes that suit a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizes {
    pub heads: usize,
    pub tokens: usize,
    /// Of EFLA, and where a row says how many tokens there are.
    pub few_heads: usize,
    pub cache: usize,
    pub cache_dim: usize,
    /// Tokens of the rows that say how many: divided by it.
    pub divisor: usize,
}

impl Sizes {
    /// `most` is how many bytes can be bound: a cache has to fit.
    pub fn of(device: wgpu::DeviceType, most: u64) -> Sizes {
        let (few_heads, divisor) = (8, 1);
        let sizes = match device {
            wgpu::DeviceType::Cpu => Sizes { heads: 8, tokens: 1024, few_heads, cache: 16384, cache_dim: 64, divisor },
            _ => Sizes { heads: 16, tokens: 4096, few_heads, cache: 65536, cache_dim: 128, divisor },
        };
        let fits = |cache: &usize| (4 * sizes.heads * cache * sizes.cache_dim) as u64 <= most;
        let cache = std::iter::successors(Some(sizes.cache), |cache| Some(cache / 2)).find(fits);
        Sizes { cache: cache.unwrap_or(sizes.cache), ..sizes }
    }

    /// Just enough to try everything out.
    pub fn quick() -> Sizes {
        Sizes { heads: 2, tokens: 128, few_heads: 2, cache: 1024, cache_dim: 64, divisor: 32 }
    }
}

/// `_f16` and the like; nothing for f32.
fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "",
        DType::F16 => "_f16",
        DType::BF16 => "_bf16",
    }
}

impl Side {
    fn new(name: String, spec: Spec) -> Side {
        Side { name: name + suffix(spec.dtype), spec }
    }

    pub fn attention(sizes: &Sizes, method: Method, pass: Pass, dim: usize, dtype: DType) -> Side {
        let method_name = if method == Method::Continuous { "continuous" } else { "ordinary" };
        let pass_name = if pass == Pass::Forward { "forward" } else { "backward" };
        let kernel = Kernel::Attention { method, pass, block_q: None };
        let spec = Spec { kernel, heads: sizes.heads, tokens: sizes.tokens, dim, dtype };
        Side::new(format!("{method_name}_{pass_name}_d{dim}"), spec)
    }

    pub fn decode(sizes: &Sizes, method: Method, dtype: DType) -> Side {
        let name = if method == Method::Continuous { "continuous_decode" } else { "ordinary_decode" };
        let kernel = Kernel::Decode { method };
        Side::new(name.into(), Spec { kernel, heads: sizes.heads, tokens: sizes.cache, dim: sizes.cache_dim, dtype })
    }

    pub fn efla(sizes: &Sizes, integrator: Integrator, pass: Pass) -> Side {
        let integrator_name = if integrator == Integrator::Exact { "exact" } else { "euler" };
        let pass_name = if pass == Pass::Forward { "forward" } else { "backward" };
        let kernel = Kernel::Efla { integrator, form: Form::Chunked, chunk: None, pass };
        let spec = Spec { kernel, heads: sizes.few_heads, tokens: sizes.tokens, dim: 64, dtype: DType::F32 };
        Side::new(format!("efla_{integrator_name}_{pass_name}"), spec)
    }

    pub fn recurrent(sizes: &Sizes) -> Side {
        let efla = Side::efla(sizes, Integrator::Exact, Pass::Forward);
        let (integrator, pass) = (Integrator::Exact, Pass::Forward);
        let kernel = Kernel::Efla { integrator, form: Form::Recurrent, chunk: None, pass };
        Side::new("efla_exact_recurrent".into(), Spec { kernel, ..efla.spec })
    }

    pub fn step(sizes: &Sizes) -> Side {
        let efla = Side::efla(sizes, Integrator::Exact, Pass::Forward);
        Side::new("efla_step".into(), Spec { kernel: Kernel::Step, tokens: 1, ..efla.spec })
    }

    /// With a number of tokens, and heads, of its own.
    fn of_tokens(mut self, sizes: &Sizes, tokens: usize) -> Side {
        self.name += &format!("_t{tokens}");
        self.spec.tokens = tokens / sizes.divisor;
        self.spec.heads = sizes.few_heads;
        self
    }

    fn stored(mut self, dtype: DType) -> Side {
        self.name += suffix(dtype);
        self.spec.dtype = dtype;
        self
    }
}

/// All rows; with `variants` those of tile shapes too.
pub fn all(sizes: &Sizes, variants: bool) -> Vec<Row> {
    use Integrator::{Euler, Exact};
    use Method::{Continuous, Softmax};
    use Pass::{Backward, Forward};
    let attention = |method, pass, dim| Side::attention(sizes, method, pass, dim, DType::F32);
    let efla = |integrator, pass| Side::efla(sizes, integrator, pass);
    let mut rows = Vec::new();
    let mut row = |key: &str, first: Side, second: Side| {
        rows.push(Row { key: key.into(), first, second: Some(second) });
    };
    for (pass, pass_name) in [(Forward, "forward"), (Backward, "backward")] {
        for dim in [64, 128] {
            let key = format!("continuous_over_ordinary_{pass_name}_d{dim}");
            row(&key, attention(Continuous, pass, dim), attention(Softmax, pass, dim));
        }
    }
    for dim in [64, 128] {
        let key = format!("backward_over_forward_attention_d{dim}");
        row(&key, attention(Continuous, Backward, dim), attention(Continuous, Forward, dim));
    }
    row("backward_over_forward_efla", efla(Exact, Backward), efla(Exact, Forward));
    row("efla_exact_over_euler", efla(Exact, Forward), efla(Euler, Forward));
    row("efla_exact_over_euler_backward", efla(Exact, Backward), efla(Euler, Backward));
    let exact = |tokens| efla(Exact, Forward).of_tokens(sizes, tokens);
    row("efla_t8192_over_t1024", exact(8192), exact(1024));
    let continuous = attention(Continuous, Forward, 64).of_tokens(sizes, 2048);
    row("efla_over_continuous_t2048_d64", exact(2048), continuous);
    let narrow = attention(Continuous, Forward, 64).stored(DType::F16);
    row("f16_over_f32_forward_d64", narrow, attention(Continuous, Forward, 64));
    row("f16_over_f32_forward_efla", efla(Exact, Forward).stored(DType::F16), efla(Exact, Forward));
    row("efla_chunked_over_recurrent", efla(Exact, Forward), Side::recurrent(sizes));
    let decode = |method| Side::decode(sizes, method, DType::F32);
    row("continuous_over_ordinary_decode", decode(Continuous), decode(Softmax));
    rows.push(Row { key: "efla_step".into(), first: Side::step(sizes), second: None });
    if variants {
        for block_q in [32, 64] {
            let spec = attention(Continuous, Forward, 64).spec;
            let kernel = Kernel::Attention { method: Continuous, pass: Forward, block_q: Some(block_q) };
            let first = Side::new(format!("continuous_rows{block_q}_forward_d64"), Spec { kernel, ..spec });
            let key = format!("continuous_rows{block_q}_over_default_forward_d64");
            rows.push(Row { key, first, second: Some(attention(Continuous, Forward, 64)) });
        }
        for (pass, pass_name) in [(Forward, "forward"), (Backward, "backward")] {
            for tokens in [16, 32, 64] {
                let (form, chunk) = (Form::Chunked, Some(tokens));
                let spec = efla(Exact, pass).spec;
                let kernel = Kernel::Efla { integrator: Exact, form, chunk, pass };
                let first = Side::new(format!("efla_chunk{tokens}_{pass_name}"), Spec { kernel, ..spec });
                let key = format!("efla_chunk{tokens}_over_default_{pass_name}");
                rows.push(Row { key, first, second: Some(efla(Exact, pass)) });
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn names_are_unique_and_mean_one_thing() {
        for sizes in [
            Sizes::of(wgpu::DeviceType::Cpu, 1 << 27),
            Sizes::of(wgpu::DeviceType::DiscreteGpu, 1 << 31),
            Sizes::quick(),
        ] {
            let rows = all(&sizes, true);
            let mut specs = HashMap::new();
            for (at, row) in rows.iter().enumerate() {
                assert!(rows[..at].iter().all(|other| other.key != row.key), "{}", row.key);
                for side in [Some(&row.first), row.second.as_ref()].into_iter().flatten() {
                    assert_eq!(*specs.entry(side.name.clone()).or_insert(side.spec), side.spec, "{}", side.name);
                }
            }
            assert_eq!(rows.len(), all(&sizes, false).len() + 8);
        }
    }

    #[test]
    fn caches_fit_a_binding() {
        let cache = |most| Sizes::of(wgpu::DeviceType::DiscreteGpu, most).cache;
        assert_eq!([1 << 31, 1 << 29, 1 << 27].map(cache), [65536, 65536, 16384]);
    }

    #[test]
    fn the_rows_of_the_bars_are_there() {
        let rows = all(&Sizes::of(wgpu::DeviceType::Cpu, 1 << 27), false);
        let row = |key: &str| rows.iter().find(|row| row.key == key).unwrap_or_else(|| panic!("{key}"));
        for key in [
            "continuous_over_ordinary_forward_d64",
            "continuous_over_ordinary_forward_d128",
            "continuous_over_ordinary_backward_d64",
            "backward_over_forward_attention_d64",
            "backward_over_forward_efla",
            "efla_exact_over_euler",
            "f16_over_f32_forward_d64",
        ] {
            let Row { first, second, .. } = row(key);
            let second = second.as_ref().unwrap();
            assert_eq!(
                [first.spec.heads, second.spec.heads, first.spec.tokens, second.spec.tokens],
                [8, 8, 1024, 1024]
            );
        }
        let long = row("efla_t8192_over_t1024");
        assert_eq!((long.first.spec.tokens, long.second.as_ref().unwrap().spec.tokens), (8192, 1024));
        assert_eq!(row("efla_over_continuous_t2048_d64").first.spec.tokens, 2048);
    }
}
