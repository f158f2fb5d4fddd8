//! One error type. Every message states the argument, what it got and what it needed.

/// Why a call was refused or could not finish.
///
/// What a caller can get wrong is reported before any work is recorded: when planning, binding, `forward` or `backward`
/// return an `Err`, nothing was recorded and no buffer of the caller was touched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has the wrong value, shape, type, size, alignment or usage.
    #[error("{argument}: got {got}, needed {needed}")]
    Argument {
        /// The argument's name, as in the API or the case file.
        argument: String,
        /// What was passed.
        got: String,
        /// What would have been accepted.
        needed: String,
    },
    /// A size exceeds what the adapter can do.
    #[error("{argument}: {got} exceeds {limit_name} = {limit} of this device")]
    Limit {
        /// What is too large.
        argument: String,
        /// Its size, in the unit of the limit.
        got: u64,
        /// Name of the limit, as in `wgpu::Limits`.
        limit_name: &'static str,
        /// The limit's value.
        limit: u64,
    },
    /// There is no adapter, or none that matches what was asked for.
    #[error("no GPU adapter {wanted}; {available}")]
    NoAdapter {
        /// What was asked for.
        wanted: String,
        /// What there is, or what to install.
        available: String,
    },
    /// The graphics stack refused or failed: device creation, pipeline compilation, read-back, lost device.
    #[error("{operation} failed: {message}")]
    Gpu {
        /// What was being done.
        operation: String,
        /// The graphics stack's own words.
        message: String,
    },
    /// A case file is malformed, truncated, or can't be read or written.
    #[error("{file}: {message}")]
    Case {
        /// The file's name.
        file: String,
        /// What is wrong with it.
        message: String,
    },
}

impl Error {
    /// An argument that is not what it should be.
    pub(crate) fn argument(
        argument: impl Into<String>,
        got: impl std::fmt::Display,
        needed: impl std::fmt::Display,
    ) -> Self {
        Error::Argument { argument: argument.into(), got: got.to_string(), needed: needed.to_string() }
    }

    /// A failure of the graphics stack.
    pub(crate) fn gpu(operation: impl Into<String>, message: impl std::fmt::Display) -> Self {
        Error::Gpu { operation: operation.into(), message: message.to_string() }
    }
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
