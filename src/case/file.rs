//! safetensors: a little-endian u64 n, n bytes of JSON (string metadata; type, shape, byte range of each tensor), data.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::{Map, Value, json};

use super::{CaseTensor, Tensors};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// Anything that went wrong with a file, with the file's name.
pub(super) fn case_error(file: &str, error: impl Display) -> Error {
    Error::Case { file: file.to_string(), message: error.to_string() }
}

/// Tensors and metadata of a safetensors file whatever they mean, for results.
///
/// F32, F16, BF16 are decoded to f32, F64 is narrowed.
///
/// # Errors
/// [`Error::Case`] with the file's name when it can't be read, is malformed, or holds elements of another type or an
/// F64 value beyond f32.
pub fn load(path: impl AsRef<Path>) -> Result<(BTreeMap<String, CaseTensor>, BTreeMap<String, String>)> {
    let name = path.as_ref().display().to_string();
    let bytes = fs::read(&path).map_err(|error| case_error(&name, error))?;
    decode(&bytes).map_err(|error| case_error(&name, error))
}

/// Writes tensors and metadata as a safetensors file, each tensor in the type it names, rounded to nearest even.
///
/// The bytes go to a temporary file beside `path` that is renamed when complete: a failure leaves no result file, and
/// a former one as it was. Equal contents give equal bytes.
///
/// # Errors
/// [`Error::Case`] with the file's name when it can't be written, exists and is not a regular file, or a tensor has not
/// as many values as its shape says or bears the reserved name `__metadata__`.
pub fn save(
    path: impl AsRef<Path>,
    tensors: &BTreeMap<String, CaseTensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let name = path.display().to_string();
    let bytes = encode(tensors, metadata).map_err(|error| case_error(&name, error))?;
    write_whole(path, &bytes).map_err(|error| case_error(&name, error))
}

/// The header is taken apart here, not by `SafeTensors::deserialize`, whose sum of sizes may overflow.
pub(super) fn decode(bytes: &[u8]) -> Result<(Tensors, BTreeMap<String, String>)> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Error::argument(
            "file",
            format!("{} bytes", bytes.len()),
            "at least the 8 bytes of a header length",
        ));
    };
    let length = u64::from_le_bytes(*length);
    let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
    let Some((header, data)) = split else {
        let got = format!("{} bytes after the header length", rest.len());
        return Err(Error::argument("file", got, format!("a header of {length} bytes")));
    };
    let header: Metadata = serde_json::from_slice(header)
        .map_err(|error| Error::argument("file", format!("a header that is wrong: {error}"), "a safetensors header"))?;
    if header.data_len() != data.len() {
        let needed = format!("the {} bytes that the header announces", header.data_len());
        return Err(Error::argument("file", format!("{} bytes of tensor data", data.len()), needed));
    }
    let mut tensors = Tensors::new();
    for (name, info) in header.tensors() {
        let (start, end) = info.data_offsets;
        let Some(bytes) = data.get(start..end) else {
            return Err(Error::argument(name, format!("bytes {start} to {end}"), format!("at most {}", data.len())));
        };
        let (dtype, values) = decode_values(&name, info.dtype, bytes)?;
        tensors.insert(name, CaseTensor { dtype, shape: info.shape.clone(), values });
    }
    let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
    Ok((tensors, metadata))
}

fn decode_values(name: &str, dtype: Dtype, bytes: &[u8]) -> Result<(DType, Vec<f32>)> {
    let halves = bytes.as_chunks().0.iter().copied();
    Ok(match dtype {
        Dtype::F32 => (DType::F32, bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()),
        Dtype::F16 => (DType::F16, halves.map(|bytes| f16::from_le_bytes(bytes).to_f32()).collect()),
        Dtype::BF16 => (DType::BF16, halves.map(|bytes| bf16::from_le_bytes(bytes).to_f32()).collect()),
        Dtype::F64 => {
            let wide = bytes.as_chunks().0.iter().copied().map(f64::from_le_bytes);
            let narrow = wide.map(|wide| {
                let value = wide as f32;
                if wide.is_finite() && !value.is_finite() {
                    return Err(Error::argument(name, format!("{wide:e}"), "values within the range of float32"));
                }
                Ok(value)
            });
            (DType::F32, narrow.collect::<Result<_>>()?)
        }
        other => return Err(Error::argument(name, format!("{other} elements"), "a floating point type: F32 or F64")),
    })
}

pub(super) fn encode(tensors: &Tensors, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    // Wide elements first: then every tensor is aligned.
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.bytes()));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_string(), json!(metadata));
    }
    let mut data = Vec::new();
    for (name, tensor) in order {
        if name == METADATA {
            return Err(Error::argument("tensor name", name, "another: it is reserved"));
        }
        let elements = tensor.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if elements != Some(tensor.values.len()) {
            let got = format!("{} values", tensor.values.len());
            return Err(Error::argument(name, got, format!("as many as shape {:?} holds", tensor.shape)));
        }
        let start = data.len();
        match tensor.dtype {
            DType::F32 => data.extend(tensor.values.iter().flat_map(|value| value.to_le_bytes())),
            DType::F16 => data.extend(tensor.values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
            DType::BF16 => data.extend(tensor.values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
        }
        let dtype = format!("{:?}", tensor.dtype);
        let info = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), info);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut header);
    bytes.append(&mut data);
    Ok(bytes)
}

const METADATA: &str = "__metadata__";

/// All of the file or none of it.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let Some(name) = path.file_name() else {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, "this names no file"));
    };
    // Renaming onto a device or a pipe would put a file in its place.
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, "this is not a regular file"));
    }
    let (temporary, mut file) = create_beside(path, name.to_os_string())?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    drop(file);
    let done = written.and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        // The first failure is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    done
}

/// A new file beside `path`; leftovers of a killed process and parallel writers have other numbers.
fn create_beside(path: &Path, name: OsString) -> std::io::Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let mut temporary = OsString::from(".");
        temporary.push(&name);
        temporary.push(format!(".{number}.tmp"));
        let temporary = path.with_file_name(temporary);
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 1000 => number += 1,
            Err(error) => return Err(error),
        }
    }
}
