//! The case files, whose expected values come from quadrature and from the recurrence in float64.

use continuous_attention::Sink;
use continuous_attention::case::{Case, Operation};

use crate::harness::{AttentionCase, EflaCase, FORMS, forward_limit, judge, widen};

fn all() -> Vec<Case> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| Case::load(file, &Default::default()).unwrap()).collect()
}

#[test]
fn every_case_comes_out_as_expected() {
    let (mut attention, mut efla) = (0, 0);
    for case in all() {
        let input = |name: &str| case.inputs.get(name).map(|tensor| tensor.values.clone());
        let needed = |name: &str| input(name).unwrap();
        let expected = |name: &str| widen(&case.expected[name].values);
        match case.operation {
            Operation::Attention { config, shape, .. } => {
                attention += 1;
                let call = AttentionCase {
                    config,
                    shape,
                    q: needed("q"),
                    k: needed("k"),
                    v: needed("v"),
                    sink_k: input("sink_k"),
                    sink_v: input("sink_v"),
                    sink_batch: if config.sink == Sink::Given { case.inputs["sink_k"].shape[0] } else { 1 },
                    intervals: input("intervals"),
                    lengths: Default::default(),
                };
                let got = call.run();
                judge(&case.file, "out", &got.out, &expected("out"), call.limit());
                judge(&case.file, "lse", &got.lse, &expected("lse"), call.limit());
                call.judge(&got, call.limit());
            }
            Operation::Efla { config, shape, .. } => {
                efla += 1;
                let call = EflaCase {
                    config,
                    shape,
                    q: needed("q"),
                    k: needed("k"),
                    v: needed("v"),
                    beta: needed("beta"),
                    log_decay: input("log_decay"),
                    initial_state: input("initial_state"),
                };
                for (form, chunk) in FORMS {
                    let call = call.in_form(form, chunk);
                    let (got, label) = (call.run(), format!("{} as {}", case.file, call.label()));
                    judge(&label, "out", &got.out, &expected("out"), forward_limit());
                    judge(&label, "final_state", &got.final_state, &expected("final_state"), forward_limit());
                    call.judge(&got);
                }
            }
        }
    }
    assert_eq!((attention, efla), (6, 4), "case files of each operator");
}
