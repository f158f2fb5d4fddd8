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
/// [`Error::Case`] with the file's name when it can't be read, is malformed, or holds elements of another type, lengths
/// too, or an F64 value beyond f32.
pub fn load(path: impl AsRef<Path>) -> Result<(BTreeMap<String, CaseTensor>, BTreeMap<String, String>)> {
    let name = path.as_ref().display().to_string();
    let bytes = fs::read(&path).map_err(|error| case_error(&name, error))?;
    let Contents { tensors, whole, metadata } = decode(&bytes).map_err(|error| case_error(&name, error))?;
    match whole.into_keys().next() {
        Some(tensor) => Err(case_error(&name, Error::argument(tensor, WHOLE, FLOATING))),
        None => Ok((tensors, metadata)),
    }
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
    write(path.as_ref(), tensors, &BTreeMap::new(), metadata)
}

/// As [`save`], with tensors of whole numbers.
pub(super) fn write(
    path: &Path,
    tensors: &Tensors,
    whole: &BTreeMap<String, Whole>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let name = path.display().to_string();
    let bytes = encode(tensors, whole, metadata).map_err(|error| case_error(&name, error))?;
    write_whole(path, &bytes).map_err(|error| case_error(&name, error))
}

/// What is wrong with the elements of a tensor, and what they should be.
pub(super) const WHOLE: &str = "whole numbers";
pub(super) const FLOATING: &str = "a floating point type: F32, F16, BF16 or F64";

/// What a file holds, whatever it means.
pub(super) struct Contents {
    pub tensors: Tensors,
    pub whole: BTreeMap<String, Whole>,
    pub metadata: BTreeMap<String, String>,
}

/// A tensor of whole numbers.
#[derive(Clone)]
pub(super) struct Whole {
    pub shape: Vec<usize>,
    pub values: Vec<i64>,
}

/// The header is taken apart here, not by `SafeTensors::deserialize`, whose sum of sizes may overflow.
pub(super) fn decode(bytes: &[u8]) -> Result<Contents> {
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
    let (mut tensors, mut whole) = (Tensors::new(), BTreeMap::new());
    for (name, info) in header.tensors() {
        let (start, end) = info.data_offsets;
        let Some(bytes) = data.get(start..end) else {
            return Err(Error::argument(name, format!("bytes {start} to {end}"), format!("at most {}", data.len())));
        };
        let shape = info.shape.clone();
        if let Some(values) = decode_whole(info.dtype, bytes) {
            whole.insert(name, Whole { shape, values });
        } else {
            let (dtype, values) = decode_values(&name, info.dtype, bytes)?;
            tensors.insert(name, CaseTensor { dtype, shape, values });
        }
    }
    let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
    Ok(Contents { tensors, whole, metadata })
}

/// None for a type that is not one of whole numbers.
fn decode_whole(dtype: Dtype, bytes: &[u8]) -> Option<Vec<i64>> {
    let words = bytes.as_chunks().0.iter().copied();
    Some(match dtype {
        Dtype::I32 => words.map(|bytes| i32::from_le_bytes(bytes).into()).collect(),
        Dtype::U32 => words.map(|bytes| u32::from_le_bytes(bytes).into()).collect(),
        Dtype::I64 => bytes.as_chunks().0.iter().copied().map(i64::from_le_bytes).collect(),
        _ => return None,
    })
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
        other => return Err(Error::argument(name, format!("{other} elements"), FLOATING)),
    })
}

pub(super) fn encode(
    tensors: &Tensors,
    whole: &BTreeMap<String, Whole>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    // Wide elements first: then every tensor is aligned.
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.bytes()));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_string(), json!(metadata));
    }
    let mut data = Vec::new();
    for (name, whole) in whole {
        let start = data.len();
        for &value in &whole.values {
            let needed = || Error::argument(name, value, format!("at most {}", i32::MAX));
            data.extend(i32::try_from(value).map_err(|_| needed())?.to_le_bytes());
        }
        let info = json!({ "dtype": "I32", "shape": whole.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), info);
    }
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
