//! Rotary position embedding against its definition and the properties it is used for.

use super::{assert_close, random};
use crate::reference::rotary::{backward, forward};
use crate::reference::support::dot;
use crate::{Error, Pairing, RotaryConfig, RotaryShape};

const PAIRINGS: [Pairing; 2] = [Pairing::Interleaved, Pairing::HalfSplit];

fn row(config: &RotaryConfig, position: u32, x: &[f64]) -> Vec<f64> {
    forward(config, &RotaryShape { batch: 1, heads: 1, tokens: 1, offset: position }, x, None).unwrap()
}

#[test]
fn angles_of_the_definition() {
    let base = RotaryConfig { dim: 5, rotary_dim: Some(4), base: 100.0, ..Default::default() };
    // Pair 0 turns by the position, pair 1 by a tenth of it; column 4 is copied.
    let (fast, slow) = (3.0f64, 0.3f64);
    let interleaved = row(&RotaryConfig { pairing: Pairing::Interleaved, ..base }, 3, &[1.0, 0.0, 0.0, 2.0, 7.0]);
    let want = [fast.cos(), fast.sin(), -2.0 * slow.sin(), 2.0 * slow.cos(), 7.0];
    assert_close("interleaved", &interleaved, &want, 1e-15);
    let half_split = row(&RotaryConfig { pairing: Pairing::HalfSplit, ..base }, 3, &[1.0, 0.0, 0.0, 2.0, 7.0]);
    let want = [fast.cos(), -2.0 * slow.sin(), fast.sin(), 2.0 * slow.cos(), 7.0];
    assert_close("half split", &half_split, &want, 1e-15);
}

/// What it is for: q·k depends on the distance of their positions only.
#[test]
fn products_depend_on_distances() {
    let mut rng = fastrand::Rng::with_seed(31);
    for pairing in PAIRINGS {
        let config = RotaryConfig { dim: 12, rotary_dim: Some(10), pairing, ..Default::default() };
        let (q, k) = (random(&mut rng, 12, 1.0), random(&mut rng, 12, 1.0));
        let product = |q_at, k_at| dot(&row(&config, q_at, &q), &row(&config, k_at, &k));
        let want = product(40, 33);
        assert!((want - dot(&q, &k)).abs() > 0.1, "the distance matters");
        for at in [0, 1, 500, 100_000] {
            assert!((product(at + 7, at) - want).abs() < 1e-9, "{pairing:?} at {at}");
        }
    }
}

#[test]
fn backward_is_the_transpose_and_the_inverse() {
    let mut rng = fastrand::Rng::with_seed(32);
    let shape = RotaryShape { batch: 2, heads: 3, tokens: 4, offset: 9 };
    for pairing in PAIRINGS {
        let config = RotaryConfig { dim: 8, rotary_dim: Some(6), pairing, ..Default::default() };
        let [x, d_out] = [0; 2].map(|_| random(&mut rng, 2 * 3 * 4 * 8, 1.0));
        let out = forward(&config, &shape, &x, None).unwrap();
        let d_x = backward(&config, &shape, &d_out, None).unwrap();
        assert!((dot(&out, &d_out) - dot(&x, &d_x)).abs() < 1e-12);
        assert_close("there and back", &backward(&config, &shape, &out, None).unwrap(), &x, 1e-14);
    }
}

#[test]
fn positions_stand_for_the_numbers_of_tokens() {
    let mut rng = fastrand::Rng::with_seed(33);
    let config = RotaryConfig { dim: 6, ..Default::default() };
    let shape = RotaryShape { batch: 2, heads: 2, tokens: 3, offset: 0 };
    let x = random(&mut rng, 2 * 2 * 3 * 6, 1.0);
    let counted = forward(&config, &RotaryShape { offset: 5, ..shape }, &x, None).unwrap();
    assert_eq!(forward(&config, &shape, &x, Some(&[5.0, 6.0, 7.0])).unwrap(), counted);
    let per_batch = [5.0, 6.0, 7.0, -0.5, 0.0, 1e5];
    let out = forward(&config, &shape, &x, Some(&per_batch)).unwrap();
    assert_eq!(out[..36], counted[..36]);
    assert_eq!(out[42..48], x[42..48], "position 0 turns nothing");
    // A negative position turns the other way.
    let back = backward(&config, &RotaryShape { tokens: 1, heads: 1, batch: 1, ..shape }, &x[36..42], Some(&[0.5]));
    assert_close("−½", &out[36..42], &back.unwrap(), 1e-15);
}

#[test]
fn refusals() {
    let config = RotaryConfig { dim: 4, ..Default::default() };
    let shape = RotaryShape { batch: 2, heads: 1, tokens: 2, offset: 0 };
    let refused = |config: &RotaryConfig, shape: &RotaryShape, x: &[f64], positions: Option<&[f64]>| {
        let [forward, backward] = [forward, backward].map(|turn| match turn(config, shape, x, positions) {
            Err(Error::Argument { argument, .. }) => argument,
            other => panic!("{other:?}"),
        });
        assert_eq!(forward.replace("x", "d_out"), backward);
        forward
    };
    let x = [0.0; 16];
    assert_eq!(refused(&config, &shape, &x[1..], None), "x");
    assert_eq!(refused(&config, &shape, &[f64::NAN; 16], None), "x");
    assert_eq!(refused(&config, &shape, &x, Some(&[0.0; 3])), "positions");
    assert_eq!(refused(&config, &shape, &x, Some(&[0.0, f64::INFINITY])), "positions");
    assert_eq!(refused(&config, &RotaryShape { offset: 1, ..shape }, &x, Some(&[0.0; 2])), "offset");
    assert_eq!(refused(&config, &RotaryShape { offset: u32::MAX, ..shape }, &x, None), "offset");
    assert_eq!(refused(&RotaryConfig { rotary_dim: Some(3), ..config }, &shape, &x, None), "rotary_dim");
    assert_eq!(refused(&RotaryConfig { base: f64::NAN, ..config }, &shape, &x, None), "base");
}
