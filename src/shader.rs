//! Composes a shader: constants, parameter struct, bindings, shared functions, kernel text.
//!
//! A kernel's WGSL file holds neither its bindings nor its parameter struct: both are written here from the host's
//! own tables, so the two sides can't disagree, and an input's access mode can follow the buffers of a call (wgpu
//! forbids one buffer bound `read` and `read_write` in one dispatch). Tensors of any storage type are read and written
//! through functions that are written here too, so that a kernel's text knows nothing of types.

use std::fmt::Write;

use crate::tensor::DType;

/// How a kernel uses a storage buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Read. Declared `read_write` when the call's buffer is also bound for writing.
    Input,
    /// Written, perhaps read too.
    Output,
    /// A part of the workspace, read or written: always `read_write`, since another part may be written.
    Workspace,
}

/// One row of a kernel's binding table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding {
    pub name: &'static str,
    pub role: Role,
    pub kind: Kind,
}

/// What a binding holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `array<f32>`.
    Floats,
    /// The same in vectors, `array<vec4<f32>>`.
    Vectors,
    /// `array<u32>`.
    Words,
    /// A tensor of f16 whose rows are whole vectors, `array<vec4<f16>>`: where the device computes in f16.
    Halves,
    /// A tensor of any storage type, through the functions that [`compose`] writes for it.
    Stored,
}

impl Binding {
    /// A tensor of any storage type.
    pub const fn stored(self) -> Self {
        Binding { kind: Kind::Stored, ..self }
    }

    /// Whole numbers.
    pub const fn words(self) -> Self {
        Binding { kind: Kind::Words, ..self }
    }

    /// Vectors of 4 halves.
    pub const fn halves(self) -> Self {
        Binding { kind: Kind::Halves, ..self }
    }

    /// Vectors of 4 floats.
    pub const fn vectors(self) -> Self {
        Binding { kind: Kind::Vectors, ..self }
    }

    pub fn is_stored(&self) -> bool {
        self.kind == Kind::Stored
    }
}

pub(crate) const fn input(name: &'static str) -> Binding {
    Binding { name, role: Role::Input, kind: Kind::Floats }
}

pub(crate) const fn output(name: &'static str) -> Binding {
    Binding { name, role: Role::Output, kind: Kind::Floats }
}

pub(crate) const fn workspace(name: &'static str) -> Binding {
    Binding { name, role: Role::Workspace, kind: Kind::Floats }
}

/// How a binding's elements lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Format {
    pub dtype: DType,
    /// Every row starts at a multiple of 4 elements and is a multiple of 4 long: vectors of 4 are read whole.
    pub vectors: bool,
}

/// A file of WGSL text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct File {
    pub name: &'static str,
    pub text: &'static str,
}

/// A WGSL file under `shaders/`.
macro_rules! wgsl {
    ($name:literal) => {
        $crate::shader::File {
            name: $name,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/", $name)),
        }
    };
}
pub(crate) use wgsl;

/// A kernel: its text and its binding table. Binding 0 is the parameters, storage buffer i is binding i + 1.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Stem of its file and its label in profilers.
    pub name: &'static str,
    /// Shared files it needs, then its own.
    pub files: &'static [File],
    /// The parameter struct.
    pub params: &'static ParamsLayout,
    pub bindings: &'static [Binding],
}

/// `const NAME: u32 = value;` of a variant.
pub(crate) type Constants = Vec<(&'static str, u32)>;

/// A kernel with everything that is compiled into it: the key of the pipeline cache.
#[derive(Debug, Clone)]
pub(crate) struct Variant {
    pub kernel: &'static Kernel,
    pub constants: Constants,
    /// Bit i: storage buffer i is an input declared `read_write`.
    pub writable_inputs: u32,
    /// One a binding.
    pub formats: Vec<Format>,
}

/// What tells two variants apart.
pub(crate) type VariantKey = (&'static str, Constants, u32, Vec<Format>);

impl Variant {
    /// Identifies the compiled shader.
    pub fn key(&self) -> VariantKey {
        (self.kernel.name, self.constants.clone(), self.writable_inputs, self.formats.clone())
    }

    /// Whether storage buffer `index` is declared `read`.
    pub fn read_only(&self, index: usize) -> bool {
        self.kernel.bindings[index].role == Role::Input && self.writable_inputs & (1 << index) == 0
    }
}

/// The fields of a uniform parameter struct, as WGSL declares them.
#[derive(Debug)]
pub(crate) struct ParamsLayout {
    /// (name, WGSL type, byte offset on the host), in order.
    pub fields: &'static [(&'static str, &'static str, usize)],
    /// Size of the host struct.
    pub size: usize,
}

/// A host type that can stand in a parameter struct.
pub(crate) trait ParamType {
    const WGSL: &'static str;
}
impl ParamType for u32 {
    const WGSL: &'static str = "u32";
}
impl ParamType for i32 {
    const WGSL: &'static str = "i32";
}
impl ParamType for f32 {
    const WGSL: &'static str = "f32";
}
impl ParamType for [u32; 4] {
    const WGSL: &'static str = "vec4<u32>";
}

/// Defines a `Pod` parameter struct and its WGSL twin. Vectors stand first and the number of scalars is a multiple
/// of 4, so that the host's layout is the uniform layout; a test compares the two by reflection.
macro_rules! params {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
        pub(crate) struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl $name {
            pub(crate) const LAYOUT: $crate::shader::ParamsLayout = $crate::shader::ParamsLayout {
                fields: &[$((
                    stringify!($field),
                    <$type as $crate::shader::ParamType>::WGSL,
                    std::mem::offset_of!($name, $field),
                ),)*],
                size: std::mem::size_of::<$name>(),
            };
        }
    };
}
pub(crate) use params;

/// Decodes and encodes 16-bit elements.
const STORAGE: File = wgsl!("shared/storage.wgsl");

/// A function on a stored binding NAME, called `NAME_suffix`. In `base + column`, `base` is the first element of a row
/// and `end` the row's length. Outputs of 16 bits have even lengths and bases: two neighbours share a word.
struct Accessor {
    suffix: &'static str,
    /// (what comes before the body, its body for f32, f32 in vectors, 16 bits, 16 bits in vectors). In the bodies NAME
    /// stands for the binding, TYPE for `f16` or `bf16`.
    signature: &'static str,
    bodies: [&'static str; 4],
}

const ACCESSORS: [Accessor; 5] = [
    // One element.
    Accessor {
        suffix: "load",
        signature: "(at: u32) -> f32",
        bodies: [
            "return NAME[at];",
            "return NAME[at / 4u][at % 4u];",
            "return decode_TYPE(vec4((NAME[at / 2u] >> (16u * (at % 2u))) & 0xffffu)).x;",
            "return decode_TYPE(split_words(NAME[at / 4u]))[at % 4u];",
        ],
    },
    // 4 neighbours from column on, 0 past the end of the row.
    Accessor {
        suffix: "load4",
        signature: "(base: u32, column: u32, end: u32) -> vec4<f32>",
        bodies: [
            "let columns = column + vec4(0u, 1u, 2u, 3u);
    let at = base + min(columns, vec4(end - 1u));
    return select(vec4(0.0), vec4(NAME[at.x], NAME[at.y], NAME[at.z], NAME[at.w]), columns < vec4(end));",
            "if column >= end {
        return vec4(0.0);
    }
    return NAME[(base + column) / 4u];",
            "let columns = column + vec4(0u, 1u, 2u, 3u);
    let at = base + min(columns, vec4(end - 1u));
    let words = vec4(NAME[at.x / 2u], NAME[at.y / 2u], NAME[at.z / 2u], NAME[at.w / 2u]);
    let halves = (words >> (16u * (at % vec4(2u)))) & vec4(0xffffu);
    return select(vec4(0.0), decode_TYPE(halves), columns < vec4(end));",
            "if column >= end {
        return vec4(0.0);
    }
    return decode_TYPE(split_words(NAME[(base + column) / 4u]));",
        ],
    },
    // 4 neighbours, all within a row.
    Accessor {
        suffix: "vector",
        signature: "(at: u32) -> vec4<f32>",
        bodies: [
            "return vec4(NAME[at], NAME[at + 1u], NAME[at + 2u], NAME[at + 3u]);",
            "return NAME[at / 4u];",
            "let words = vec4(NAME[at / 2u], NAME[(at + 1u) / 2u], NAME[(at + 2u) / 2u], NAME[(at + 3u) / 2u]);
    return decode_TYPE((words >> (16u * ((at + vec4(0u, 1u, 2u, 3u)) % vec4(2u)))) & vec4(0xffffu));",
            "return decode_TYPE(split_words(NAME[at / 4u]));",
        ],
    },
    // 4 neighbours from column on, but none past the end of the row.
    Accessor {
        suffix: "store4",
        signature: "(base: u32, column: u32, end: u32, value: vec4<f32>)",
        bodies: [
            "for (var c = 0u; c < 4u && column + c < end; c++) {
        NAME[base + column + c] = value[c];
    }",
            "if column < end {
        NAME[(base + column) / 4u] = value;
    }",
            "let words = join_halves(encode_TYPE(value));
    if column < end {
        NAME[(base + column) / 2u] = words.x;
    }
    if column + 2u < end {
        NAME[(base + column) / 2u + 1u] = words.y;
    }",
            "if column < end {
        NAME[(base + column) / 4u] = join_halves(encode_TYPE(value));
    }",
        ],
    },
    // 2 elements `stride` apart, or only the first. Elements of 16 bits come in pairs of neighbours.
    Accessor {
        suffix: "store2",
        signature: "(at: u32, stride: u32, both: bool, value: vec2<f32>)",
        bodies: [
            "NAME[at] = value.x;
    if both {
        NAME[at + stride] = value.y;
    }",
            "NAME[at / 4u][at % 4u] = value.x;
    if both {
        NAME[(at + stride) / 4u][(at + stride) % 4u] = value.y;
    }",
            "NAME[at / 2u] = join_halves(encode_TYPE(value.xyxy)).x;",
            "NAME[at / 4u][at / 2u % 2u] = join_halves(encode_TYPE(value.xyxy)).x;",
        ],
    },
];

impl Accessor {
    /// The function but for `fn` and its name.
    fn text(&self, name: &str, format: Format) -> String {
        let (is_half, kind) = match format.dtype {
            DType::F32 => (0, ""),
            DType::F16 => (2, "f16"),
            DType::BF16 => (2, "bf16"),
        };
        let body = self.bodies[is_half + usize::from(format.vectors)].replace("NAME", name).replace("TYPE", kind);
        format!("{} {{\n    {body}\n}}", self.signature)
    }
}

/// A composed shader and where its lines come from.
pub(crate) struct Composed {
    pub text: String,
    /// Of every line of `text` its file and its line there, from 1.
    origins: Vec<(&'static str, usize)>,
}

/// Writes out the loops of a file, `//# for NAME in COUNT` or `//# for NAME in A B C` to `//# end`: the lines between
/// once for each value, which stands where they say `$NAME`. COUNT is a number or one of the constants. WGSL cannot index
/// what should stay in registers by a variable, nor broadcast from a lane that is one.
fn unroll(lines: &[(usize, &str)], constants: &Constants, out: &mut Vec<(usize, String)>) {
    let mut at = 0;
    while at < lines.len() {
        let (number, line) = lines[at];
        at += 1;
        let Some(head) = line.trim().strip_prefix("//# for ") else {
            out.push((number, line.to_string()));
            continue;
        };
        let (name, list) = head.split_once(" in ").expect("`for NAME in …`");
        let values: Vec<String> = match list.split_whitespace().collect::<Vec<_>>()[..] {
            [count] => {
                let constant = constants.iter().find(|(name, _)| *name == count).map(|(_, value)| *value);
                let count = constant.or_else(|| count.parse().ok()).expect("a count");
                (0..count).map(|value| value.to_string()).collect()
            }
            ref names => names.iter().map(|name| name.to_string()).collect(),
        };
        let mut depth = 1;
        let length = lines[at..].iter().position(|(_, line)| {
            depth += i32::from(line.trim().starts_with("//# for ")) - i32::from(line.trim() == "//# end");
            depth == 0
        });
        let body = &lines[at..at + length.expect("`end`")];
        at += body.len() + 1;
        for value in values {
            let replaced: Vec<_> =
                body.iter().map(|(number, line)| (*number, line.replace(&format!("${name}"), &value))).collect();
            let replaced: Vec<_> = replaced.iter().map(|(number, line)| (*number, line.as_str())).collect();
            unroll(&replaced, constants, out);
        }
    }
}

/// Whether WGSL text calls a function: `d_q_load` is no call of `q_load`.
fn calls(text: &str, function: &str) -> bool {
    text.match_indices(&format!("{function}("))
        .any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

fn is_directive(line: &str) -> bool {
    line.starts_with("enable ")
}

/// Writes the complete WGSL of a variant.
pub(crate) fn compose(variant: &Variant) -> Composed {
    let mut text = String::new();
    let _ = writeln!(text, "// {}", variant.kernel.name);
    // A file's directives come before all declarations.
    for line in variant.kernel.files.iter().flat_map(|file| file.text.lines()).filter(|line| is_directive(line)) {
        let _ = writeln!(text, "{line}");
    }
    for (name, value) in &variant.constants {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    }
    let _ = writeln!(text, "struct Params {{");
    for (name, kind, _) in variant.kernel.params.fields {
        let _ = writeln!(text, "    {name}: {kind},");
    }
    let _ = writeln!(text, "}}\n@group(0) @binding(0) var<uniform> params: Params;");
    let mut files = variant.kernel.files.to_vec();
    for (index, (binding, format)) in variant.kernel.bindings.iter().zip(&variant.formats).enumerate() {
        let access = if variant.read_only(index) { "read" } else { "read_write" };
        let element = match (binding.kind, format.dtype, format.vectors) {
            (Kind::Words, _, _) => "u32",
            (Kind::Vectors, _, _) => "vec4<f32>",
            (Kind::Halves, _, _) => "vec4<f16>",
            (_, DType::F32, false) => "f32",
            (_, DType::F32, true) => "vec4<f32>",
            (_, _, false) => "u32",
            (_, _, true) => "vec2<u32>",
        };
        let (index, name) = (index + 1, binding.name);
        let _ = writeln!(text, "@group(0) @binding({index}) var<storage, {access}> {name}: array<{element}>;");
        for accessor in ACCESSORS {
            let function = format!("{name}_{}", accessor.suffix);
            if binding.is_stored() && variant.kernel.files.iter().any(|file| calls(file.text, &function)) {
                let _ = writeln!(text, "fn {function}{}", accessor.text(name, *format));
            }
        }
        if format.dtype != DType::F32 && files[0].name != STORAGE.name {
            files.insert(0, STORAGE);
        }
    }
    let mut origins: Vec<_> = (1..=text.lines().count()).map(|line| ("generated prelude", line)).collect();
    for file in &files {
        let lines = file.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        let lines: Vec<_> = lines.filter(|(_, line)| !is_directive(line)).collect();
        let mut unrolled = Vec::new();
        unroll(&lines, &variant.constants, &mut unrolled);
        for (number, line) in unrolled {
            origins.push((file.name, number));
            text.push_str(&line);
            text.push('\n');
        }
    }
    Composed { text, origins }
}

impl Composed {
    /// Rewrites the places of a compiler's message, `wgsl:LINE:COLUMN`, to the file and line they come from.
    pub fn locate(&self, message: &str) -> String {
        let mut parts = message.split("wgsl:");
        let mut located = parts.next().unwrap_or_default().to_string();
        for part in parts {
            let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            match part[..digits].parse::<usize>() {
                Ok(line) => {
                    let (file, line) = self.origins.get(line.wrapping_sub(1)).copied().unwrap_or(("shader", line));
                    located.push_str(&format!("{file}:{line}{}", &part[digits..]));
                }
                Err(_) => located.push_str(&format!("wgsl:{part}")),
            }
        }
        located
    }
}

#[cfg(test)]
mod tests;
