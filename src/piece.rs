//! Calls that are too large for one binding, taken apart over batch and heads.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::tensor::TensorView;

/// More dispatches than any call of a real size needs: sizes beyond are refused.
const MOST_PIECES: usize = 4096;

/// A part of a call: some sequences of the batch with all their heads, or some heads of one sequence. Heads are those of
/// which a call has fewest, so that groups stay together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub batch: Range<usize>,
    pub heads: Range<usize>,
}

impl Piece {
    /// The whole call.
    pub fn whole(batch: usize, heads: usize) -> Self {
        Piece { batch: 0..batch, heads: 0..heads }
    }

    /// Takes it apart so that the workspace of every piece can be bound, which `bytes` lays out or refuses; the pieces, and
    /// the bytes that suffice for each.
    fn plan(&self, bytes: impl Fn(&Piece) -> Result<u64>) -> Result<(Vec<Piece>, u64)> {
        let pieces = self.split(&|piece| bytes(piece).map(drop))?;
        let most = pieces.iter().try_fold(0, |most, piece| Ok(bytes(piece)?.max(most)))?;
        Ok((pieces, most))
    }

    /// As [`Piece::plan`], with room for the kernels of one subgroup a workgroup if they are `wanted`, and without where
    /// their larger workspace fits no binding, even of a single head; whether there is room comes first.
    pub fn plan_lanes(
        &self,
        wanted: bool,
        bytes: impl Fn(&Piece, bool) -> Result<u64>,
    ) -> Result<(bool, Vec<Piece>, u64)> {
        let plan = |lanes| {
            let (pieces, most) = self.plan(|piece| bytes(piece, lanes))?;
            Ok((lanes, pieces, most))
        };
        if wanted { plan(true).or_else(|_: Error| plan(false)) } else { plan(false) }
    }

    /// The fewest halves of halves of it that fit; an [`Error::Limit`] of a single head is the caller's.
    pub fn split(&self, fits: &impl Fn(&Piece) -> Result<()>) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        self.split_into(fits, &mut pieces)?;
        Ok(pieces)
    }

    fn split_into(&self, fits: &impl Fn(&Piece) -> Result<()>, pieces: &mut Vec<Piece>) -> Result<()> {
        let error = match fits(self) {
            Ok(()) => {
                pieces.push(self.clone());
                return Ok(());
            }
            Err(error) => error,
        };
        match (&error, self.halves()) {
            (Error::Limit { .. }, Some(halves)) if pieces.len() < MOST_PIECES => {
                halves.iter().try_for_each(|half| half.split_into(fits, pieces))
            }
            _ => Err(error),
        }
    }

    fn halves(&self) -> Option<[Piece; 2]> {
        let cut = |range: &Range<usize>| {
            let middle = range.start + range.len() / 2;
            [range.start..middle, middle..range.end]
        };
        if self.batch.len() > 1 {
            Some(cut(&self.batch).map(|batch| Piece { batch, heads: self.heads.clone() }))
        } else if self.heads.len() > 1 {
            Some(cut(&self.heads).map(|heads| Piece { batch: self.batch.clone(), heads }))
        } else {
            None
        }
    }

    /// The piece's part of a tensor `[batch, …]`.
    pub fn of_batch(&self, view: &Option<TensorView>) -> Result<Option<TensorView>> {
        view.as_ref().map(|view| view.narrow(0, self.batch.start, self.batch.len())).transpose()
    }

    /// The piece's part of a tensor `[batch, heads · group, …]`.
    pub fn of(&self, view: &TensorView, group: usize) -> Result<TensorView> {
        view.narrow(0, self.batch.start, self.batch.len())?.narrow(
            1,
            self.heads.start * group,
            self.heads.len() * group,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_whole_and_fit() {
        let limit = Error::Limit { argument: "q".to_string(), got: 0, limit_name: "", limit: 0 };
        for (batch, heads, largest) in [(1, 1, 1), (5, 3, 15), (5, 3, 7), (5, 3, 2), (1, 9, 4), (3, 1, 1), (0, 2, 1)] {
            let fits = |piece: &Piece| {
                if piece.batch.len() * piece.heads.len() <= largest { Ok(()) } else { Err(limit.clone()) }
            };
            let pieces = Piece::whole(batch, heads).split(&fits).unwrap();
            let mut seen = vec![0; batch * heads];
            for piece in &pieces {
                assert!(fits(piece).is_ok());
                assert!(piece.batch.len() <= 1 || piece.heads == (0..heads));
                for b in piece.batch.clone() {
                    piece.heads.clone().for_each(|h| seen[b * heads + h] += 1);
                }
            }
            assert!(seen.iter().all(|&count| count == 1), "{pieces:?}");
        }
        assert_eq!(Piece::whole(4, 4).split(&|_| Err(limit.clone())), Err(limit.clone()));
    }
}
