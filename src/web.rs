//! What a browser says later.
//!
//! Natively an error scope answers at once. A browser answers when the page's own code has returned, and until then
//! whatever came of a refused call does nothing. The answers are kept here, and reading back, the only thing that
//! waits, hears them first: no result is handed out that an error stands behind. It takes those that are outstanding when
//! it begins, so that of several tasks each hears its own, as long as it does not wait between recording and reading.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::error::{Error, Result};

type Answer = Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>;

/// Error scopes of a device whose answers are outstanding, and the first error among those that came.
#[derive(Default)]
pub(crate) struct Answers {
    inner: Mutex<(Vec<(String, Answer)>, Option<Error>)>,
}

impl std::fmt::Debug for Answers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Answers")
    }
}

impl Answers {
    /// Keeps the answer of a scope around `operation`, and forgets those that came since and say nothing.
    pub fn expect(&self, operation: &str, answer: impl Future<Output = Option<wgpu::Error>> + 'static) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (outstanding, first) = &mut *inner;
        outstanding.push((operation.to_string(), Box::pin(answer)));
        let mut context = Context::from_waker(Waker::noop());
        outstanding.retain_mut(|(operation, answer)| match answer.as_mut().poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(error) => {
                keep_first(first, operation, error);
                false
            }
        });
    }

    /// Takes all answers that are outstanding now; the future waits for them.
    ///
    /// # Errors
    /// The first error that any of them tells of, or that came since the last call.
    pub fn settle(&self) -> impl Future<Output = Result<()>> + use<> {
        let (outstanding, mut first) = std::mem::take(&mut *self.inner.lock().unwrap_or_else(PoisonError::into_inner));
        async move {
            for (operation, answer) in outstanding {
                keep_first(&mut first, &operation, answer.await);
            }
            first.map_or(Ok(()), Err)
        }
    }
}

fn keep_first(first: &mut Option<Error>, operation: &str, error: Option<wgpu::Error>) {
    if let Some(error) = error {
        first.get_or_insert_with(|| Error::gpu(operation, error));
    }
}
