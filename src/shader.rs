//! Composes a shader: constants, parameter struct, bindings, shared functions, kernel text.
//!
//! A kernel's WGSL file holds neither its bindings nor its parameter struct: both are written here from the host's
//! own tables, so the two sides can't disagree, and an input's access mode can follow the buffers of a call (wgpu
//! forbids one buffer bound `read` and `read_write` in one dispatch).

use std::fmt::Write;

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
}

pub(crate) const fn input(name: &'static str) -> Binding {
    Binding { name, role: Role::Input }
}

pub(crate) const fn output(name: &'static str) -> Binding {
    Binding { name, role: Role::Output }
}

pub(crate) const fn workspace(name: &'static str) -> Binding {
    Binding { name, role: Role::Workspace }
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
}

impl Variant {
    /// Identifies the compiled shader.
    pub fn key(&self) -> (&'static str, Constants, u32) {
        (self.kernel.name, self.constants.clone(), self.writable_inputs)
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

/// A composed shader and where its lines come from.
pub(crate) struct Composed {
    pub text: String,
    /// (first line in `text`, file), ascending, 1-based.
    origins: Vec<(usize, &'static str)>,
}

/// Writes the complete WGSL of a variant.
pub(crate) fn compose(variant: &Variant) -> Composed {
    let mut text = String::new();
    let _ = writeln!(text, "// {}", variant.kernel.name);
    for (name, value) in &variant.constants {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    }
    let _ = writeln!(text, "struct Params {{");
    for (name, kind, _) in variant.kernel.params.fields {
        let _ = writeln!(text, "    {name}: {kind},");
    }
    let _ = writeln!(text, "}}\n@group(0) @binding(0) var<uniform> params: Params;");
    for (index, binding) in variant.kernel.bindings.iter().enumerate() {
        let access = if variant.read_only(index) { "read" } else { "read_write" };
        let _ =
            writeln!(text, "@group(0) @binding({}) var<storage, {access}> {}: array<f32>;", index + 1, binding.name);
    }
    let mut origins = vec![(1, "generated prelude")];
    for file in variant.kernel.files {
        origins.push((text.lines().count() + 1, file.name));
        text.push_str(file.text);
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
                    let origin = self.origins.iter().rev().find(|(start, _)| *start <= line);
                    let (start, file) = origin.copied().unwrap_or((1, "shader"));
                    located.push_str(&format!("{file}:{}{}", line + 1 - start, &part[digits..]));
                }
                Err(_) => located.push_str(&format!("wgsl:{part}")),
            }
        }
        located
    }
}

#[cfg(test)]
mod tests;
