//! Continuous softmax attention, and ordinary softmax attention, in float64.
//!
//! Nodes 0..=T_k carry keys and values; node 0 is the sink. On segment i, between node i−1 and node i and of length
//! Δ_i, both are linear, and a query row integrates over its visible segments (*Continuous softmax attention*,
//! spaces.ac.cn archive 11980):
//!
//! ```text
//! out = ∫ exp(scale·q·k(s)) v(s) ds / ∫ exp(scale·q·k(s)) ds        lse = ln ∫ exp(scale·q·k(s)) ds
//! ```
//!
//! With a_i = scale·q·k_i every integral of a segment is a moment of e^{a(s)}, see [`Moments`]. They are
//! taken relative to the segment's higher end, and those ends relative to the row's maximum, so nothing overflows.
//! What remains is the rounding of the logits themselves: ε·max|a| relative in every weight.

use super::phi::Moments;
use super::support::{
    add_at, add_scaled, check_finite, check_heads, check_size, check_tensor, dot, elements, gather, map_heads, part,
    part_mut, places, zeros,
};
use crate::attention::{AttentionConfig, AttentionShape, Lengths, MAX_DIM, Method, Sink};
use crate::error::{Error, Result};
use std::ops::Range;

/// Input tensors, dense and row-major.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[B, H_q, T_q, D]`.
    pub q: &'a [f64],
    /// `[B, H_kv, T_k, D]`.
    pub k: &'a [f64],
    /// `[B, H_kv, T_k, D_v]`.
    pub v: &'a [f64],
    /// `[B or 1, H_kv, D]`, given exactly with [`Sink::Given`].
    pub sink_k: Option<&'a [f64]>,
    /// `[B or 1, H_kv, D_v]`, given exactly with [`Sink::Given`].
    pub sink_v: Option<&'a [f64]>,
    /// `[B, T_k]`, entry i−1 is Δ_i ≥ 0, the length of segment i; all 1 if absent. Without a sink there is no segment
    /// 1, and entry 0 is not used.
    pub intervals: Option<&'a [f64]>,
}

/// What attention computes.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `[B, H_q, T_q, D_v]`.
    pub out: Vec<f64>,
    /// `[B, H_q, T_q]`, the logarithm of each row's denominator; −∞ for a row that integrates over nothing.
    pub lse: Vec<f64>,
}

/// Gradients of Σ d_out·out + Σ d_lse·lse, each in the shape of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// `[B, H_q, T_q, D]`.
    pub d_q: Vec<f64>,
    /// `[B, H_kv, T_k, D]`.
    pub d_k: Vec<f64>,
    /// `[B, H_kv, T_k, D_v]`.
    pub d_v: Vec<f64>,
    /// `[B or 1, H_kv, D]` as sink_k, summed over B when 1; with [`Sink::Given`] only.
    pub d_sink_k: Option<Vec<f64>>,
    /// `[B or 1, H_kv, D_v]` as sink_v, summed over B when 1; with [`Sink::Given`] only.
    pub d_sink_v: Option<Vec<f64>>,
    /// `[B, T_k]`, if intervals were given. Infinite only where the true value is beyond float64.
    pub d_intervals: Option<Vec<f64>>,
}

/// First and last node that query row `row` sees, or `None` if it sees nothing.
///
/// The last is row + 1 + (T_k − T_q) if causal, else T_k. The first is 0 with a sink, else 1; a window W moves it so
/// that W segments remain, or W tokens for [`Method::Softmax`].
pub fn visible_nodes(config: &AttentionConfig, shape: &AttentionShape, row: usize) -> Option<(usize, usize)> {
    let last = match config.causal {
        true => row.saturating_add(1).saturating_add(shape.keys).checked_sub(shape.queries)?,
        false => shape.keys,
    };
    let sink = match config.sink {
        Sink::Zero | Sink::Given => true,
        Sink::First => last >= 1,
        Sink::None => false,
    };
    let first = if sink { 0 } else { 1 };
    let kept = match (config.window, config.method) {
        (None, _) => first,
        (Some(window), Method::Continuous) => last.saturating_sub(window),
        (Some(window), Method::Softmax) => last.saturating_sub(window).saturating_add(1),
    };
    let first = first.max(kept);
    (first <= last).then_some((first, last))
}

/// out and lse of every row.
///
/// With L_i = Δ_i ∫(1−s) e^{a(s)} ds and R_i = Δ_i ∫ s e^{a(s)} ds the weight of node i is w_i = R_i + L_{i+1}, each
/// term only if its segment is visible, and out = Σ w_i v_i / Σ w_i, lse = ln Σ w_i. A row that sees one node only
/// returns that node's value and lse −∞; one that sees no node, or only segments of length 0, returns 0 and −∞. For
/// [`Method::Softmax`], w_i = e^{a_i} over the visible tokens.
///
/// Errors: anything about sizes or values that is not as [`Inputs`] says, and logits beyond float64.
pub fn forward(config: &AttentionConfig, shape: &AttentionShape, inputs: &Inputs) -> Result<Output> {
    check(config, shape, inputs)?;
    let mut out = zeros("out", &[shape.batch, shape.heads, shape.queries, config.value_dim])?;
    let mut lse = zeros("lse", &[shape.batch, shape.heads, shape.queries])?;
    let heads = map_heads(units(shape), |unit| Head::new(config, shape, inputs, unit).forward());
    for (unit, head) in heads.into_iter().enumerate() {
        let head = head?;
        part_mut(&mut out, unit, head.out.len()).copy_from_slice(&head.out);
        part_mut(&mut lse, unit, head.lse.len()).copy_from_slice(&head.lse);
    }
    Ok(Output { out, lse })
}

/// Gradients of Σ d_out·out + Σ d_lse·lse; `d_out` has the shape of out, `d_lse` that of lse.
///
/// With g_i = d_out·(v_i − out) + d_lse, Z = Σ w and M_i = Δ_i ∫ s(1−s) e^{a(s)} ds, segment i adds
/// `[M_i g_{i−1} + (R_i − M_i) g_i]/Z` to d_a_i, `[(L_i − M_i) g_{i−1} + M_i g_i]/Z` to d_a_{i−1} and
/// (L_i g_{i−1} + R_i g_i)/(Δ_i Z) to d_intervals_i, whose limit is taken at Δ_i = 0. A row whose lse is −∞ contributes
/// nothing, save that one that sees a single node adds d_out to the d_v of that node.
///
/// Errors: as [`forward`], and the same checks on `d_out` and `d_lse`.
pub fn backward(
    config: &AttentionConfig,
    shape: &AttentionShape,
    inputs: &Inputs,
    d_out: &[f64],
    d_lse: Option<&[f64]>,
) -> Result<Gradients> {
    check(config, shape, inputs)?;
    check_tensor("d_out", d_out, &[shape.batch, shape.heads, shape.queries, config.value_dim])?;
    if let Some(d_lse) = d_lse {
        check_tensor("d_lse", d_lse, &[shape.batch, shape.heads, shape.queries])?;
    }
    let AttentionConfig { head_dim, value_dim, .. } = *config;
    let AttentionShape { heads, kv_heads, queries, keys, .. } = *shape;
    let mut sum = Gradients {
        d_q: vec![0.0; inputs.q.len()],
        d_k: vec![0.0; inputs.k.len()],
        d_v: vec![0.0; inputs.v.len()],
        d_sink_k: inputs.sink_k.map(|sink| vec![0.0; sink.len()]),
        d_sink_v: inputs.sink_v.map(|sink| vec![0.0; sink.len()]),
        d_intervals: inputs.intervals.map(|intervals| vec![0.0; intervals.len()]),
    };
    let parts = map_heads(units(shape), |unit| {
        let d_lse = d_lse.map(|d_lse| part(d_lse, unit, queries));
        Head::new(config, shape, inputs, unit).backward(part(d_out, unit, queries * value_dim), d_lse)
    });
    for (unit, head) in parts.into_iter().enumerate() {
        let head = head?;
        let (batch, kv_head) = (unit / heads, unit % heads / shape.group());
        let kv_unit = batch * kv_heads + kv_head;
        part_mut(&mut sum.d_q, unit, queries * head_dim).copy_from_slice(&head.d_q);
        let d_k = part_mut(&mut sum.d_k, kv_unit, keys * head_dim);
        let d_v = part_mut(&mut sum.d_v, kv_unit, keys * value_dim);
        let (d_node_0_k, d_nodes_k) = head.d_keys.split_at(head_dim);
        let (d_node_0_v, d_nodes_v) = head.d_values.split_at(value_dim);
        add_scaled(d_k, 1.0, d_nodes_k);
        add_scaled(d_v, 1.0, d_nodes_v);
        if config.sink == Sink::First && keys > 0 {
            add_scaled(part_mut(d_k, 0, head_dim), 1.0, d_node_0_k);
            add_scaled(part_mut(d_v, 0, value_dim), 1.0, d_node_0_v);
        }
        if let Some(d_sink_k) = &mut sum.d_sink_k {
            let at = sink_unit(d_sink_k.len(), shape, head_dim, batch, kv_head);
            add_scaled(part_mut(d_sink_k, at, head_dim), 1.0, d_node_0_k);
        }
        if let Some(d_sink_v) = &mut sum.d_sink_v {
            let at = sink_unit(d_sink_v.len(), shape, value_dim, batch, kv_head);
            add_scaled(part_mut(d_sink_v, at, value_dim), 1.0, d_node_0_v);
        }
        if let Some(d_intervals) = &mut sum.d_intervals {
            add_scaled(part_mut(d_intervals, batch, keys), 1.0, &head.d_intervals);
        }
    }
    Ok(sum)
}

/// Joins the results of two disjoint stretches of the integral: weights e^{lse_j − lse}, lse = ln(e^{lse_a} +
/// e^{lse_b}).
///
/// `out` has `value_dim` elements for every element of `lse`. Where one lse is −∞ the other side is returned, where
/// both are, out_a + out_b. Errors: lengths that don't fit together, an lse that is NaN or +∞.
pub fn merge(a: &Output, b: &Output, value_dim: usize) -> Result<Output> {
    let rows = a.lse.len();
    for (name, lse) in [("lse of a", &a.lse), ("lse of b", &b.lse)] {
        if lse.len() != rows {
            return Err(Error::argument(name, format!("{} elements", lse.len()), format!("{rows}, as lse of a")));
        }
        if let Some(bad) = lse.iter().find(|lse| lse.is_nan() || **lse == f64::INFINITY) {
            return Err(Error::argument(name, bad, "finite values or −∞"));
        }
    }
    let needed = elements("out of a", &[rows, value_dim])?;
    for (name, out) in [("out of a", &a.out), ("out of b", &b.out)] {
        if out.len() != needed {
            let got = format!("{} elements", out.len());
            return Err(Error::argument(name, got, format!("{needed} elements, shape [{rows}, {value_dim}]")));
        }
    }
    let mut merged = Output { out: Vec::with_capacity(needed), lse: Vec::with_capacity(rows) };
    for row in 0..rows {
        let (lse_a, lse_b) = (a.lse[row], b.lse[row]);
        let larger = lse_a.max(lse_b);
        let (weight_a, weight_b, lse) = if larger == f64::NEG_INFINITY {
            (1.0, 1.0, larger)
        } else {
            let (e_a, e_b) = ((lse_a - larger).exp(), (lse_b - larger).exp());
            (e_a / (e_a + e_b), e_b / (e_a + e_b), larger + (lse_a.min(lse_b) - larger).exp().ln_1p())
        };
        let rows = part(&a.out, row, value_dim).iter().zip(part(&b.out, row, value_dim));
        merged.out.extend(rows.map(|(a, b)| weight_a * a + weight_b * b));
        merged.lse.push(lse);
    }
    Ok(merged)
}

/// Gradients of Σ d_out·out + Σ d_lse·lse of a [`merge`]: of a's and of b's out and lse.
///
/// With w_j = e^{lse_j − lse}: ∂lse/∂lse_j = w_j and ∂out/∂lse_j = w_j (out_j − out), hence d_out_j = w_j d_out and
/// d_lse_j = w_j (d_out·(out_j − out) + d_lse). Where both lse are −∞, out is a plain sum: d_out_a = d_out_b = d_out, and
/// d_lse_j = 0.
///
/// Errors: as [`merge`], and the same for `d_out` and `d_lse`, which have the shapes of out and lse.
pub fn merge_backward(
    a: &Output,
    b: &Output,
    value_dim: usize,
    d_out: &[f64],
    d_lse: Option<&[f64]>,
) -> Result<[Output; 2]> {
    let merged = merge(a, b, value_dim)?;
    let rows = merged.lse.len();
    check_tensor("d_out", d_out, &[rows, value_dim])?;
    if let Some(d_lse) = d_lse {
        check_tensor("d_lse", d_lse, &[rows])?;
    }
    Ok([a, b].map(|side| {
        let mut gradient = Output { out: vec![0.0; d_out.len()], lse: vec![0.0; rows] };
        for row in 0..rows {
            let d_out = part(d_out, row, value_dim);
            let nothing = merged.lse[row] == f64::NEG_INFINITY;
            let weight = if nothing { 1.0 } else { (side.lse[row] - merged.lse[row]).exp() };
            add_scaled(part_mut(&mut gradient.out, row, value_dim), weight, d_out);
            if !nothing && weight > 0.0 {
                let along = dot(d_out, part(&side.out, row, value_dim)) - dot(d_out, part(&merged.out, row, value_dim));
                gradient.lse[row] = weight * (along + d_lse.map_or(0.0, |d_lse| d_lse[row]));
            }
        }
        gradient
    }))
}

/// The largest |scale·q·k_i| over all rows and the nodes each of them sees; 0 if there are none.
///
/// A logit's own rounding is of size ε·|a|, so this is what an error bound for lower precision scales with.
pub fn largest_logit(config: &AttentionConfig, shape: &AttentionShape, inputs: &Inputs) -> Result<f64> {
    check(config, shape, inputs)?;
    let heads = map_heads(units(shape), |unit| -> Result<f64> {
        let head = Head::new(config, shape, inputs, unit);
        let mut largest = 0.0f64;
        for row in 0..shape.queries {
            if let Some((first, last)) = visible_nodes(config, shape, row) {
                let logits = head.logits(row, first, last)?;
                largest = logits.iter().fold(largest, |largest, a| largest.max(a.abs()));
            }
        }
        Ok(largest)
    });
    heads.into_iter().try_fold(0.0f64, |largest, head| Ok(largest.max(head?)))
}

/// As [`forward`], each sequence of a ragged batch by itself. Keys behind a cache's length are not looked at.
///
/// Errors: as [`forward`], and lengths that don't fit the shape.
pub fn forward_ragged(
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
    inputs: &Inputs,
) -> Result<Output> {
    let sequences = sequences(config, shape, lengths, inputs)?;
    let mut out = zeros("out", &[shape.batch, shape.heads, shape.queries, config.value_dim])?;
    let mut lse = zeros("lse", &[shape.batch, shape.heads, shape.queries])?;
    for sequence in &sequences {
        let output = sequence.with(inputs, |inputs| forward(config, &sequence.shape, inputs))?;
        add_at(&mut out, &sequence.out, &output.out);
        add_at(&mut lse, &sequence.lse, &output.lse);
    }
    Ok(Output { out, lse })
}

/// As [`backward`], each sequence of a ragged batch by itself; gradients of what none of them has are 0.
///
/// Errors: as [`backward`], and lengths that don't fit the shape.
pub fn backward_ragged(
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
    inputs: &Inputs,
    d_out: &[f64],
    d_lse: Option<&[f64]>,
) -> Result<Gradients> {
    let sequences = sequences(config, shape, lengths, inputs)?;
    check_tensor("d_out", d_out, &[shape.batch, shape.heads, shape.queries, config.value_dim])?;
    if let Some(d_lse) = d_lse {
        check_tensor("d_lse", d_lse, &[shape.batch, shape.heads, shape.queries])?;
    }
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut sum = Gradients {
        d_q: zeros(inputs.q),
        d_k: zeros(inputs.k),
        d_v: zeros(inputs.v),
        d_sink_k: inputs.sink_k.map(zeros),
        d_sink_v: inputs.sink_v.map(zeros),
        d_intervals: inputs.intervals.map(zeros),
    };
    for sequence in &sequences {
        let d_out = gather(d_out, &sequence.out);
        let d_lse = d_lse.map(|d_lse| gather(d_lse, &sequence.lse));
        let gradients =
            sequence.with(inputs, |inputs| backward(config, &sequence.shape, inputs, &d_out, d_lse.as_deref()))?;
        add_at(&mut sum.d_q, &sequence.q, &gradients.d_q);
        add_at(&mut sum.d_k, &sequence.k, &gradients.d_k);
        add_at(&mut sum.d_v, &sequence.v, &gradients.d_v);
        for (sum, places, part) in [
            (&mut sum.d_sink_k, &sequence.sink_k, &gradients.d_sink_k),
            (&mut sum.d_sink_v, &sequence.sink_v, &gradients.d_sink_v),
            (&mut sum.d_intervals, &sequence.intervals, &gradients.d_intervals),
        ] {
            if let (Some(sum), Some(part)) = (sum, part) {
                add_at(sum, places, part);
            }
        }
    }
    Ok(sum)
}

/// As [`largest_logit`], of all sequences of a ragged batch.
pub fn largest_logit_ragged(
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
    inputs: &Inputs,
) -> Result<f64> {
    sequences(config, shape, lengths, inputs)?.iter().try_fold(0.0f64, |largest, sequence| {
        Ok(largest.max(sequence.with(inputs, |inputs| largest_logit(config, &sequence.shape, inputs))?))
    })
}

/// One sequence of a batch: where its elements stand in the tensors of the call.
struct Sequence {
    /// A batch of one.
    shape: AttentionShape,
    q: Vec<usize>,
    k: Vec<usize>,
    v: Vec<usize>,
    sink_k: Vec<usize>,
    sink_v: Vec<usize>,
    intervals: Vec<usize>,
    out: Vec<usize>,
    lse: Vec<usize>,
}

impl Sequence {
    /// Calls `work` with the sequence's own inputs.
    fn with<T>(&self, inputs: &Inputs, work: impl FnOnce(&Inputs) -> Result<T>) -> Result<T> {
        let own = |tensor: Option<&[f64]>, places: &[usize]| tensor.map(|tensor| gather(tensor, places));
        let (q, k, v) = (gather(inputs.q, &self.q), gather(inputs.k, &self.k), gather(inputs.v, &self.v));
        let (sink_k, sink_v) = (own(inputs.sink_k, &self.sink_k), own(inputs.sink_v, &self.sink_v));
        let intervals = own(inputs.intervals, &self.intervals);
        work(&Inputs {
            q: &q,
            k: &k,
            v: &v,
            sink_k: sink_k.as_deref(),
            sink_v: sink_v.as_deref(),
            intervals: intervals.as_deref(),
        })
    }
}

/// The sequences of a call whose tensors have the sizes they should; their values are not looked at.
fn sequences(
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
    inputs: &Inputs,
) -> Result<Vec<Sequence>> {
    lengths.validate(shape)?;
    check_sizes(config, shape, lengths.sequences(shape), inputs)?;
    let AttentionConfig { head_dim, value_dim, .. } = *config;
    let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
    // Batch entry, rows and tokens of each.
    let ranges: Vec<(usize, Range<usize>, Range<usize>)> = match lengths {
        Lengths::Full => (0..batch).map(|batch| (batch, 0..queries, 0..keys)).collect(),
        Lengths::Packed { cu_seqlens_q, cu_seqlens_k } => cu_seqlens_q
            .windows(2)
            .zip(cu_seqlens_k.windows(2))
            .map(|(queries, keys)| (0, queries[0]..queries[1], keys[0]..keys[1]))
            .collect(),
        Lengths::Cache { kv_lens } => {
            kv_lens.iter().enumerate().map(|(batch, &length)| (batch, 0..queries, 0..length)).collect()
        }
    };
    let sequence = |(n, (batch, own_queries, own_keys)): (usize, (usize, Range<usize>, Range<usize>))| {
        let rows = |width: usize| places([batch, heads, queries, width], &own_queries);
        let tokens = |width: usize| places([batch, kv_heads, keys, width], &own_keys);
        let sink = |sink: Option<&[f64]>, width: usize| {
            let length = sink.map_or(0, <[f64]>::len);
            let n = if length == kv_heads * width { 0 } else { n };
            (n * kv_heads * width..(n + 1) * kv_heads * width).collect()
        };
        Sequence {
            shape: AttentionShape { batch: 1, queries: own_queries.len(), keys: own_keys.len(), ..*shape },
            q: rows(head_dim),
            k: tokens(head_dim),
            v: tokens(value_dim),
            sink_k: sink(inputs.sink_k, head_dim),
            sink_v: sink(inputs.sink_v, value_dim),
            // Without heads nothing else bounds how many keys there are.
            intervals: inputs.intervals.map_or_else(Vec::new, |_| places([batch, 1, keys, 1], &own_keys)),
            out: rows(value_dim),
            lse: rows(1),
        }
    };
    Ok(ranges.into_iter().enumerate().map(sequence).collect())
}

/// Query heads of the whole batch; none if no head has a row.
fn units(shape: &AttentionShape) -> usize {
    if shape.queries == 0 { 0 } else { shape.batch * shape.heads }
}

/// Which row of a sink tensor of `length` elements belongs to a kv head: its batch is B or 1.
fn sink_unit(length: usize, shape: &AttentionShape, dim: usize, batch: usize, kv_head: usize) -> usize {
    let per_batch = length == shape.batch * shape.kv_heads * dim;
    if per_batch { batch * shape.kv_heads + kv_head } else { kv_head }
}

fn check(config: &AttentionConfig, shape: &AttentionShape, inputs: &Inputs) -> Result<()> {
    check_sizes(config, shape, shape.batch, inputs)?;
    check_finite("q", inputs.q)?;
    check_finite("k", inputs.k)?;
    check_finite("v", inputs.v)?;
    check_finite("sink_k", inputs.sink_k.unwrap_or_default())?;
    check_finite("sink_v", inputs.sink_v.unwrap_or_default())?;
    let intervals = inputs.intervals.unwrap_or_default();
    check_finite("intervals", intervals)?;
    match intervals.iter().position(|&length| length < 0.0) {
        Some(at) => Err(Error::argument("intervals", format!("{} at element {at}", intervals[at]), "lengths ≥ 0")),
        None => Ok(()),
    }
}

/// `sequences` of the call may each have a sink of their own.
fn check_sizes(config: &AttentionConfig, shape: &AttentionShape, sequences: usize, inputs: &Inputs) -> Result<()> {
    config.validate()?;
    shape.validate()?;
    let AttentionConfig { head_dim, value_dim, .. } = *config;
    let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
    check_heads(batch.max(sequences), heads.max(kv_heads))?;
    check_size("q", inputs.q, &[batch, heads, queries, head_dim])?;
    check_size("k", inputs.k, &[batch, kv_heads, keys, head_dim])?;
    check_size("v", inputs.v, &[batch, kv_heads, keys, value_dim])?;
    for (name, sink, dim) in [("sink_k", inputs.sink_k, head_dim), ("sink_v", inputs.sink_v, value_dim)] {
        match (sink, config.sink) {
            (None, Sink::Given) => return Err(Error::argument(name, "none", "a tensor, with Sink::Given")),
            (Some(_), Sink::Zero | Sink::First | Sink::None) => {
                return Err(Error::argument(name, "a tensor", format!("none, with Sink::{:?}", config.sink)));
            }
            (None, _) => {}
            (Some(sink), Sink::Given) => {
                let one = elements(name, &[kv_heads, dim])?;
                let all = elements(name, &[sequences, kv_heads, dim])?;
                if sink.len() != one && sink.len() != all {
                    let needed = format!("{all} or {one} elements, shape [{sequences} or 1, {kv_heads}, {dim}]");
                    return Err(Error::argument(name, format!("{} elements", sink.len()), needed));
                }
            }
        }
    }
    if let Some(intervals) = inputs.intervals {
        if config.method == Method::Softmax {
            return Err(Error::argument("intervals", "a tensor", "none, with Method::Softmax"));
        }
        check_size("intervals", intervals, &[batch, keys])?;
    }
    Ok(())
}

/// The three integrals of segment i, in units of e^{higher of its two logits} and of its length.
struct Segment {
    /// Δ_i.
    length: f64,
    /// The higher logit less the row's reference level.
    height: f64,
    /// ∫ (1−s)² e^{a(s)} ds = (L_i − M_i)/Δ_i.
    left_square: f64,
    /// ∫ s(1−s) e^{a(s)} ds = M_i/Δ_i.
    cross: f64,
    /// ∫ s² e^{a(s)} ds = (R_i − M_i)/Δ_i.
    right_square: f64,
}

/// The weights of one row, in units of e^{level}.
struct Row {
    level: f64,
    /// Of nodes first..=last.
    weights: Vec<f64>,
    /// Z, their sum.
    total: f64,
    /// Segments first+1..=last; empty for [`Method::Softmax`].
    segments: Vec<Segment>,
}

/// What a row sees.
enum View {
    Nothing,
    OneNode(usize),
    Nodes { first: usize, last: usize, row: Row },
}

/// One query head with the keys and values it reads.
struct Head<'a> {
    config: &'a AttentionConfig,
    shape: &'a AttentionShape,
    scale: f64,
    /// `[T_q, D]`.
    q: &'a [f64],
    /// `[T_k, D]`.
    k: &'a [f64],
    /// `[T_k, D_v]`.
    v: &'a [f64],
    /// `[D]` and `[D_v]`, the key and value of node 0; not used with [`Sink::None`].
    node_0: (&'a [f64], &'a [f64]),
    /// `[T_k]`.
    intervals: Option<&'a [f64]>,
}

struct HeadGradients {
    d_q: Vec<f64>,
    /// `[T_k + 1, D]`, node 0 first.
    d_keys: Vec<f64>,
    /// `[T_k + 1, D_v]`, node 0 first.
    d_values: Vec<f64>,
    /// `[T_k]`.
    d_intervals: Vec<f64>,
}

impl<'a> Head<'a> {
    /// Query head `unit % H_q` of batch `unit / H_q`.
    fn new(config: &'a AttentionConfig, shape: &'a AttentionShape, inputs: &Inputs<'a>, unit: usize) -> Self {
        static ZEROS: [f64; MAX_DIM] = [0.0; MAX_DIM];
        let AttentionConfig { head_dim, value_dim, .. } = *config;
        let (batch, kv_head) = (unit / shape.heads, unit % shape.heads / shape.group());
        let kv_unit = batch * shape.kv_heads + kv_head;
        let k = part(inputs.k, kv_unit, shape.keys * head_dim);
        let v = part(inputs.v, kv_unit, shape.keys * value_dim);
        let mut node_0 = (&ZEROS[..head_dim], &ZEROS[..value_dim]);
        if config.sink == Sink::First && shape.keys > 0 {
            node_0 = (part(k, 0, head_dim), part(v, 0, value_dim));
        }
        if let (Some(sink_k), Some(sink_v)) = (inputs.sink_k, inputs.sink_v) {
            node_0 = (
                part(sink_k, sink_unit(sink_k.len(), shape, head_dim, batch, kv_head), head_dim),
                part(sink_v, sink_unit(sink_v.len(), shape, value_dim, batch, kv_head), value_dim),
            );
        }
        Head {
            config,
            shape,
            scale: config.scale(),
            q: part(inputs.q, unit, shape.queries * head_dim),
            k,
            v,
            node_0,
            intervals: inputs.intervals.map(|intervals| part(intervals, batch, shape.keys)),
        }
    }

    fn query(&self, row: usize) -> &[f64] {
        part(self.q, row, self.config.head_dim)
    }

    fn key(&self, node: usize) -> &[f64] {
        if node == 0 { self.node_0.0 } else { part(self.k, node - 1, self.config.head_dim) }
    }

    fn value(&self, node: usize) -> &[f64] {
        if node == 0 { self.node_0.1 } else { part(self.v, node - 1, self.config.value_dim) }
    }

    /// a_first..=a_last of a row.
    fn logits(&self, row: usize, first: usize, last: usize) -> Result<Vec<f64>> {
        let query = self.query(row);
        let logits: Vec<f64> = (first..=last).map(|node| self.scale * dot(query, self.key(node))).collect();
        // A difference of two logits must be a number as well.
        match logits.iter().find(|a| !(2.0 * **a).is_finite()) {
            Some(a) => Err(Error::argument("q, k", format!("a logit of {a}"), "logits within float64")),
            None => Ok(logits),
        }
    }

    fn view(&self, row: usize) -> Result<View> {
        let Some((first, last)) = visible_nodes(self.config, self.shape, row) else { return Ok(View::Nothing) };
        match self.config.method {
            Method::Softmax => {
                let logits = self.logits(row, first, last)?;
                let level = logits.iter().fold(f64::NEG_INFINITY, |level, &a| level.max(a));
                let weights: Vec<f64> = logits.iter().map(|a| (a - level).exp()).collect();
                let total = weights.iter().sum();
                Ok(View::Nodes { first, last, row: Row { level, weights, total, segments: Vec::new() } })
            }
            Method::Continuous if first == last => Ok(View::OneNode(first)),
            Method::Continuous => {
                let row = continuous_row(&self.logits(row, first, last)?, |i| match self.intervals {
                    Some(intervals) => intervals[first + i],
                    None => 1.0,
                });
                Ok(row.map_or(View::Nothing, |row| View::Nodes { first, last, row }))
            }
        }
    }

    fn mean_value(&self, first: usize, row: &Row) -> Vec<f64> {
        let mut out = vec![0.0; self.config.value_dim];
        for (i, weight) in row.weights.iter().enumerate() {
            add_scaled(&mut out, weight / row.total, self.value(first + i));
        }
        out
    }

    fn forward(&self) -> Result<Output> {
        let mut output = Output { out: Vec::new(), lse: Vec::new() };
        for row in 0..self.shape.queries {
            let (out, lse) = match self.view(row)? {
                View::Nothing => (vec![0.0; self.config.value_dim], f64::NEG_INFINITY),
                View::OneNode(node) => (self.value(node).to_vec(), f64::NEG_INFINITY),
                View::Nodes { first, row, .. } => (self.mean_value(first, &row), row.level + row.total.ln()),
            };
            output.out.extend(out);
            output.lse.push(lse);
        }
        Ok(output)
    }

    fn backward(&self, d_out: &[f64], d_lse: Option<&[f64]>) -> Result<HeadGradients> {
        let AttentionConfig { head_dim, value_dim, .. } = *self.config;
        let mut gradients = HeadGradients {
            d_q: vec![0.0; self.q.len()],
            d_keys: vec![0.0; self.k.len() + head_dim],
            d_values: vec![0.0; self.v.len() + value_dim],
            d_intervals: vec![0.0; self.shape.keys],
        };
        for query in 0..self.shape.queries {
            let d_out = part(d_out, query, value_dim);
            match self.view(query)? {
                View::Nothing => {}
                View::OneNode(node) => add_scaled(part_mut(&mut gradients.d_values, node, value_dim), 1.0, d_out),
                View::Nodes { first, last, row } => {
                    let out = self.mean_value(first, &row);
                    let d_lse = d_lse.map_or(0.0, |d_lse| d_lse[query]);
                    let g: Vec<f64> = (first..=last)
                        .map(|node| {
                            let value = self.value(node).iter().zip(&out);
                            d_out.iter().zip(value).map(|(d, (v, out))| d * (v - out)).sum::<f64>() + d_lse
                        })
                        .collect();
                    let d_logits = row.d_logits(&g);
                    for (i, node) in (first..=last).enumerate() {
                        let d_product = self.scale * d_logits[i];
                        add_scaled(part_mut(&mut gradients.d_q, query, head_dim), d_product, self.key(node));
                        add_scaled(part_mut(&mut gradients.d_keys, node, head_dim), d_product, self.query(query));
                        let weight = row.weights[i] / row.total;
                        add_scaled(part_mut(&mut gradients.d_values, node, value_dim), weight, d_out);
                    }
                    for (i, segment) in row.segments.iter().enumerate() {
                        gradients.d_intervals[first + i] += segment.d_length(g[i], g[i + 1], row.total);
                    }
                }
            }
        }
        Ok(gradients)
    }
}

/// The weights of a row with these logits, where `length(i)` is the length of the segment from logit i to logit i + 1;
/// `None` if all lengths are 0.
fn continuous_row(logits: &[f64], length: impl Fn(usize) -> f64) -> Option<Row> {
    let mut segments: Vec<Segment> = logits
        .windows(2)
        .enumerate()
        .map(|(i, ends)| {
            let moments = Moments::new((ends[1] - ends[0]).abs());
            let rising = ends[1] > ends[0];
            let (left_square, right_square) = match rising {
                true => (moments.far_square, moments.near_square),
                false => (moments.near_square, moments.far_square),
            };
            let height = ends[0].max(ends[1]);
            Segment { length: length(i), height, left_square, cross: moments.cross, right_square }
        })
        .collect();
    // Segments of length 0 take no part in the level: their logits may lie anywhere above it. Counting the lengths in
    // keeps Z near 1 also when the highest segment is very short.
    let level = segments
        .iter()
        .filter(|segment| segment.length > 0.0)
        .map(|segment| segment.height + segment.length.ln())
        .reduce(f64::max)?;
    let mut weights = vec![0.0; logits.len()];
    for (i, segment) in segments.iter_mut().enumerate() {
        segment.height -= level;
        if segment.length > 0.0 {
            weights[i] += segment.mass(segment.left_square + segment.cross);
            weights[i + 1] += segment.mass(segment.right_square + segment.cross);
        }
    }
    let total = weights.iter().sum();
    Some(Row { level, weights, total, segments })
}

impl Segment {
    /// Δ e^{height} · integral.
    fn mass(&self, integral: f64) -> f64 {
        self.length * self.height.exp() * integral
    }

    /// (ℓ g_left + r g_right)/Z with ℓ, r = L, R per unit of length, hence finite at length 0.
    fn d_length(&self, g_left: f64, g_right: f64, total: f64) -> f64 {
        let mean = (self.left_square + self.cross) * g_left + (self.right_square + self.cross) * g_right;
        if mean == 0.0 { 0.0 } else { self.height.exp() * (mean / total) }
    }
}

impl Row {
    /// d_a of every node from its g.
    fn d_logits(&self, g: &[f64]) -> Vec<f64> {
        if self.segments.is_empty() {
            return self.weights.iter().zip(g).map(|(weight, g)| weight * g / self.total).collect();
        }
        let mut d_logits = vec![0.0; g.len()];
        for (i, segment) in self.segments.iter().enumerate().filter(|(_, segment)| segment.length > 0.0) {
            let (left, right) = (g[i] / self.total, g[i + 1] / self.total);
            d_logits[i] += segment.mass(segment.left_square * left + segment.cross * right);
            d_logits[i + 1] += segment.mass(segment.cross * left + segment.right_square * right);
        }
        d_logits
    }
}
