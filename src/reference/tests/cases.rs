//! The given case files: results of quadrature and of the recurrence in float64, rounded to f32.

use super::assert_close;
use crate::reference::{attention, efla};
use crate::{
    AttentionConfig, AttentionShape, EflaConfig, EflaShape, Form, Integrator, Method, Sink, reference::compare,
};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;

struct Case {
    name: String,
    tensors: HashMap<String, (Vec<usize>, Vec<f64>)>,
    metadata: HashMap<String, String>,
}

impl Case {
    fn all() -> Vec<Case> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
        let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.retain(|name| name.extension().is_some_and(|extension| extension == "safetensors"));
        names.sort();
        assert!(names.len() >= 10, "only {} case files", names.len());
        names.iter().map(|path| Case::read(path)).collect()
    }

    fn read(path: &std::path::Path) -> Case {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut tensors = HashMap::new();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            assert_eq!(tensor.dtype(), Dtype::F32);
            let values = tensor.data().as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
            tensors.insert(name, (tensor.shape().to_vec(), values.collect()));
        }
        let metadata = header.metadata().clone().unwrap_or_default();
        Case { name: path.file_name().unwrap().to_string_lossy().into_owned(), tensors, metadata }
    }

    fn key(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }

    fn tensor(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(|(_, values)| &values[..])
    }

    fn dims(&self, name: &str) -> [usize; 4] {
        self.tensors[name].0[..].try_into().unwrap()
    }

    /// Every expected result must have been computed, and be right.
    fn judge(&self, results: &[(&str, Option<&[f64]>)]) {
        for name in self.tensors.keys().filter_map(|name| name.strip_prefix("expected.")) {
            let got = results.iter().find(|(result, _)| *result == name).and_then(|(_, values)| *values);
            let got = got.unwrap_or_else(|| panic!("{}: nothing computes {name}", self.name));
            let want = self.tensor(&format!("expected.{name}")).unwrap();
            assert_close(&format!("{}: {name}", self.name), got, want, 1e-7);
            // The comparator agrees, the roles being exchanged: here it is the expected value that is rounded.
            let scale = if name == "lse" { compare::Scale::Lse } else { compare::Scale::Tensor };
            let rounded: Vec<f32> = want.iter().map(|&x| x as f32).collect();
            assert!(compare::compare(&rounded, got, 1e-7, scale).passed(), "{}: {name}", self.name);
        }
    }

    fn attention(&self) {
        let [batch, heads, queries, head_dim] = self.dims("q");
        let [_, kv_heads, keys, value_dim] = self.dims("v");
        let config = AttentionConfig {
            head_dim,
            value_dim,
            method: if self.key("op") == "softmax_attention" { Method::Softmax } else { Method::Continuous },
            sink: match self.key("sink") {
                "" | "zero" => Sink::Zero,
                "first" => Sink::First,
                "given" => Sink::Given,
                "none" => Sink::None,
                other => panic!("sink {other}"),
            },
            causal: self.key("causal") != "false",
            window: self.key("window").parse().ok(),
            scale: self.key("scale").parse().ok(),
            block_q: None,
        };
        let config = match config.method {
            Method::Softmax => AttentionConfig { sink: Sink::None, ..config },
            Method::Continuous => config,
        };
        let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
        let inputs = attention::Inputs {
            q: self.tensor("q").unwrap(),
            k: self.tensor("k").unwrap(),
            v: self.tensor("v").unwrap(),
            sink_k: self.tensor("sink_k"),
            sink_v: self.tensor("sink_v"),
            intervals: self.tensor("intervals"),
        };
        let output = attention::forward(&config, &shape, &inputs).unwrap();
        let (d_out, d_lse) = (self.tensor("d_out").unwrap(), self.tensor("d_lse"));
        let gradients = attention::backward(&config, &shape, &inputs, d_out, d_lse).unwrap();
        self.judge(&[
            ("out", Some(&output.out)),
            ("lse", Some(&output.lse)),
            ("d_q", Some(&gradients.d_q)),
            ("d_k", Some(&gradients.d_k)),
            ("d_v", Some(&gradients.d_v)),
            ("d_sink_k", gradients.d_sink_k.as_deref()),
            ("d_sink_v", gradients.d_sink_v.as_deref()),
            ("d_intervals", gradients.d_intervals.as_deref()),
        ]);
    }

    fn efla(&self, form: Form, chunk: Option<usize>) {
        let [batch, heads, tokens, key_dim] = self.dims("k");
        let [_, value_heads, _, value_dim] = self.dims("v");
        let config = EflaConfig {
            key_dim,
            value_dim,
            integrator: match self.key("integrator") {
                "" | "exact" => Integrator::Exact,
                "euler" => Integrator::Euler,
                "rk2" => Integrator::RungeKutta2,
                "rk4" => Integrator::RungeKutta4,
                other => panic!("integrator {other}"),
            },
            normalize_q: self.key("normalize_q") == "true",
            normalize_k: self.key("normalize_k") == "true",
            scale: self.key("scale").parse().ok(),
            chunk,
            form,
            gated: self.tensor("log_decay").is_some(),
        };
        let shape = EflaShape { batch, heads, value_heads, tokens };
        let inputs = efla::Inputs {
            q: self.tensor("q").unwrap(),
            k: self.tensor("k").unwrap(),
            v: self.tensor("v").unwrap(),
            beta: self.tensor("beta").unwrap(),
            log_decay: self.tensor("log_decay"),
            initial_state: self.tensor("initial_state"),
        };
        let output = efla::forward(&config, &shape, &inputs).unwrap();
        let (d_out, d_final_state) = (self.tensor("d_out").unwrap(), self.tensor("d_final_state"));
        let gradients = efla::backward(&config, &shape, &inputs, d_out, d_final_state).unwrap();
        self.judge(&[
            ("out", Some(&output.out)),
            ("final_state", Some(&output.final_state)),
            ("d_q", Some(&gradients.d_q)),
            ("d_k", Some(&gradients.d_k)),
            ("d_v", Some(&gradients.d_v)),
            ("d_beta", Some(&gradients.d_beta)),
            ("d_initial_state", Some(&gradients.d_initial_state)),
        ]);
    }
}

#[test]
fn given_cases() {
    for case in Case::all() {
        match case.key("op") {
            "continuous_attention" | "softmax_attention" => case.attention(),
            "efla" => {
                for (form, chunk) in [(Form::Recurrent, None), (Form::Chunked, None), (Form::Chunked, Some(16))] {
                    case.efla(form, chunk);
                }
            }
            other => panic!("{}: op {other}", case.name),
        }
    }
}
