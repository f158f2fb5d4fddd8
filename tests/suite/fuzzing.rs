//! A few seconds of what `fuzz/` does for hours: bytes from nowhere, and case files that were tampered with.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::fuzz;
use crate::harness::{gpu, rng};

/// Runs `attempt` with one seed after another for as long as `CONTINUOUS_ATTENTION_FUZZ_SECONDS` says, and names the seed
/// of one that panics or takes long.
fn for_a_while(name: &str, attempt: impl Fn(&mut fastrand::Rng)) {
    let setting = std::env::var("CONTINUOUS_ATTENTION_FUZZ_SECONDS");
    let seconds = setting.map_or(3, |text| text.parse().expect("CONTINUOUS_ATTENTION_FUZZ_SECONDS is a number"));
    let (begin, mut seed) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_secs(seconds) {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| attempt(&mut rng(seed))));
        assert!(result.is_ok(), "{name}: seed {seed} panicked");
        // Compiling a shader takes seconds, too.
        assert!(start.elapsed() < Duration::from_secs(60), "{name}: seed {seed} took {:?}", start.elapsed());
        seed += 1;
    }
    println!("{name}: {seed} attempts");
}

#[test]
fn calls_of_any_numbers() {
    for_a_while("calls", |rng| {
        let bytes: Vec<u8> = (0..rng.usize(..160)).map(|_| rng.u8(..)).collect();
        fuzz::calls(gpu(), &bytes);
    });
}

#[test]
fn case_files_tampered_with() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let files: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    files.iter().for_each(|file| fuzz::case(file));
    for_a_while("case files", |rng| {
        let chosen = rng.usize(..files.len());
        let file = tampered(rng, &files[chosen]);
        let file = if rng.u8(..4) == 0 { tampered(rng, &file) } else { file };
        fuzz::case(&file);
    });
}

/// Words that mean something in a header, and some that should not.
const WORDS: [&str; 24] = [
    "0",
    "1",
    "2",
    "-1",
    "4294967296",
    "18446744073709551615",
    "1e9",
    "null",
    "[]",
    "{}",
    "\"\"",
    "\"q\"",
    "\"k\"",
    "\"cu_seqlens\"",
    "\"kv_lens\"",
    "\"I32\"",
    "\"F16\"",
    "\"F64\"",
    "\"BOOL\"",
    "\"none\"",
    "\"efla\"",
    "\"bthd\"",
    "\"given\"",
    "\"nan\"",
];

fn tampered(rng: &mut fastrand::Rng, file: &[u8]) -> Vec<u8> {
    let mut file = file.to_vec();
    let length = file.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    let header = 8..usize::try_from(length).ok().and_then(|length| length.checked_add(8)).unwrap_or(0).min(file.len());
    match rng.u8(..8) {
        0 => file.truncate(rng.usize(..=file.len())),
        1 if file.len() >= 8 => file[..8].copy_from_slice(&(rng.u64(..) >> rng.u8(..64)).to_le_bytes()),
        2 => (0..=rng.usize(..8)).for_each(|_| {
            let at = rng.usize(..file.len().max(1));
            if let Some(byte) = file.get_mut(at) {
                *byte ^= 1 << rng.u8(..8);
            }
        }),
        3 if file.len() >= header.end + 4 && header.end > 8 => {
            let at = header.end + rng.usize(..(file.len() - header.end) / 4) * 4;
            file[at..at + 4].copy_from_slice(&[f32::NAN, f32::INFINITY, -1.0, 1e30][rng.usize(..4)].to_le_bytes());
        }
        4 if header.len() > 2 => {
            // Half of a header within itself, as deep as it goes: names twice, brackets without end.
            let (from, to) = (rng.usize(header.clone()), rng.usize(header.clone()));
            let part = file[from.min(to)..from.max(to)].repeat(rng.usize(1..4));
            edit(&mut file, from..from, &part);
        }
        _ if header.len() > 2 => {
            // A number, a text or a bracket becomes another.
            let at = rng.usize(header.clone());
            let word = |byte: u8| byte.is_ascii_alphanumeric() || b"_.\"".contains(&byte);
            let start = (header.start..at).rev().find(|&at| !word(file[at])).map_or(header.start, |at| at + 1);
            let end = (at..header.end).find(|&at| !word(file[at])).unwrap_or(header.end).max(start + 1);
            edit(&mut file, start..end.min(header.end), WORDS[rng.usize(..WORDS.len())].as_bytes());
        }
        _ => {}
    }
    file
}

/// Replaces a part of the header and mends its length.
fn edit(file: &mut Vec<u8>, range: std::ops::Range<usize>, with: &[u8]) {
    let length = u64::from_le_bytes(*file.first_chunk().unwrap());
    let length = length.wrapping_sub(range.len() as u64).wrapping_add(with.len() as u64);
    file.splice(range, with.iter().copied());
    file[..8].copy_from_slice(&length.to_le_bytes());
}
