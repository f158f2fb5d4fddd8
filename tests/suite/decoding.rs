//! Few rows against many keys, which are then split over workgroups.

use continuous_attention::{AttentionConfig, AttentionShape, Lengths, Method, Sink};

use crate::harness::{AttentionCase, rng};

fn shape(batch: usize, queries: usize, keys: usize) -> AttentionShape {
    AttentionShape { batch, heads: 4, kv_heads: 2, queries, keys }
}

#[test]
fn split_keys() {
    let mut rng = rng(1);
    for (turn, sink) in [Sink::Zero, Sink::First, Sink::Given, Sink::None].into_iter().enumerate() {
        for (queries, keys, causal) in [(1, 1500, true), (3, 5000, false), (33, 2077, true)] {
            let config = AttentionConfig { head_dim: 6 + turn, value_dim: 9, sink, causal, ..Default::default() };
            AttentionCase::random(config, shape(1 + turn % 2, queries, keys), &mut rng)
                .with_intervals(&mut rng)
                .check();
        }
    }
    for (queries, keys) in [(1, 1500), (3, 5000)] {
        let base = AttentionConfig { head_dim: 8, value_dim: 8, sink: Sink::None, ..Default::default() };
        let config = AttentionConfig { method: Method::Softmax, ..base };
        AttentionCase::random(config, shape(2, queries, keys), &mut rng).check();
    }
}

/// The first rows see no node, one node, one segment, all within the first part.
#[test]
fn rows_that_see_little_of_split_keys() {
    let mut rng = rng(2);
    for sink in [Sink::Zero, Sink::First, Sink::Given, Sink::None] {
        let config = AttentionConfig { head_dim: 4, value_dim: 5, sink, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1103, keys: 1101 };
        AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng).check();
    }
}

/// Which rows a NaN among split keys reaches: those that see it, and no other.
#[test]
fn a_bad_key_among_split_keys() {
    let mut rng = rng(3);
    let config = AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 40, keys: 1200 };
    let clean = AttentionCase::random(config, shape, &mut rng);
    let mut dirty = clean.clone();
    dirty.k[(1159 + 20) * 4] = f32::NAN;
    let (clean, dirty) = (clean.run(), dirty.run());
    for row in 0..40 {
        // Row r sees tokens up to 1160 + r.
        let spoiled = row >= 19;
        assert_eq!(dirty.lse[row].is_nan(), spoiled, "row {row}");
        for c in 4 * row..4 * row + 4 {
            assert_eq!(dirty.out[c].is_nan(), spoiled, "row {row}");
            assert!(spoiled || dirty.out[c] == clean.out[c], "row {row}");
        }
    }
}

/// Caches of different lengths in one call, some of them short.
#[test]
fn split_caches() {
    let mut rng = rng(4);
    let config = AttentionConfig { head_dim: 8, value_dim: 6, ..Default::default() };
    let kv_lens = vec![2000, 0, 3, 1024, 1];
    let case = AttentionCase::random(config, shape(5, 2, 2048), &mut rng);
    let ragged = AttentionCase { lengths: Lengths::Cache { kv_lens: kv_lens.clone() }, ..case.clone() }.run();
    for (batch, &keys) in kv_lens.iter().enumerate() {
        let cut = |x: &[f32], heads: usize, tokens: usize, width: usize, own: usize| -> Vec<f32> {
            let sequence = &x[batch * heads * tokens * width..][..heads * tokens * width];
            sequence.chunks(tokens * width).flat_map(|head| &head[..own * width]).copied().collect()
        };
        let alone = AttentionCase {
            shape: shape(1, 2, keys),
            q: cut(&case.q, 4, 2, 8, 2),
            k: cut(&case.k, 2, 2048, 8, keys),
            v: cut(&case.v, 2, 2048, 6, keys),
            ..case.clone()
        };
        let own = |x: &[f32], width: usize| cut(x, 4, 2, width, 2);
        alone.judge(
            &crate::harness::AttentionOutput { out: own(&ragged.out, 6), lse: own(&ragged.lse, 1) },
            alone.limit(),
        );
    }
}
