//! Every variant through naga: what the shader declares is what the host believes.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Write};

use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy, Layouter};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, StorageAccess, TypeInner};

use super::{Binding, Constants, Format, Kernel, Kind, Role, Variant, compose};
use crate::attention::{self, AttentionConfig, Method, Sink};
use crate::copy;
use crate::efla::forward::Build;
use crate::efla::{self, Form};
use crate::gpu::{
    MATRIX_INVOCATIONS, MATRIX_WORKGROUP_BYTES, MAX_STORAGE_BUFFERS, MIN_INVOCATIONS, MIN_WORKGROUP_BYTES, Matrices,
};
use crate::rotary;
use crate::tensor::DType;

/// What a variant needs besides WebGPU's defaults; for each there is a twin that needs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// `…_lanes`.
    Subgroups,
    /// `…_matrix`.
    Matrices,
    /// The same without matrix units.
    Halves,
}

fn needs(variant: &Variant) -> Needs {
    let has = |constant: &str| variant.constants.iter().any(|(name, _)| *name == constant);
    match variant.kernel.name.ends_with("_emulated") {
        _ if has("LANES") => Needs::Subgroups,
        true => Needs::Halves,
        false if has("SUBGROUP") => Needs::Matrices,
        false => Needs::Nothing,
    }
}

type Compiled = (&'static Kernel, Constants);

/// Every kernel with every set of constants that the operators compile.
fn kernels() -> Vec<Compiled> {
    let mut kernels: Vec<Compiled> = vec![
        (&attention::operands::PACK, vec![]),
        (&attention::forward::COMBINE, vec![]),
        (&attention::backward::ROWS, vec![]),
        (&attention::backward::REDUCE, vec![]),
        (&attention::merge::FORWARD, vec![]),
        (&attention::merge::BACKWARD, vec![]),
        (&copy::COPY, vec![]),
        (&rotary::ROTARY, vec![]),
    ];
    let dims = [32, 64, 96, 128, 160, 192, 224, 256];
    for method in [Method::Continuous, Method::Softmax] {
        for (sink, ragged) in [(Sink::Zero, 0), (Sink::Given, 1)] {
            let config = AttentionConfig { method, sink, ..Default::default() };
            let lanes = |groups| attention::forward::lanes_constants(&config, ("RAGGED", ragged), ragged == 1, groups);
            kernels.push((&attention::forward::FORWARD_LANES, lanes(attention::forward::GROUPS)));
            for kernel in
                [&attention::backward::OUTPUTS_LANES, &attention::backward::DQ_LANES, &attention::backward::DKV_LANES]
            {
                kernels.push((kernel, lanes(attention::backward::GROUPS)));
            }
        }
        for value_dim in dims {
            for head_dim in [32, value_dim, 256] {
                let variants =
                    [(0, false, 16, false), (1, true, 32, false), (0, true, 64, false), (1, false, 32, true)];
                for (ragged, split, subgroup, emulated) in variants {
                    let constants = attention::forward::constants(method, value_dim, 32, ("RAGGED", ragged), split);
                    let matrices = Matrices { subgroup, emulated };
                    kernels.push(attention::matrix::kernel(matrices, head_dim, constants));
                }
            }
            for (block_q, ragged, split) in [(32, 0, false), (64, 0, false), (8, 0, true), (32, 1, true)] {
                let constants = attention::forward::constants(method, value_dim, block_q, ("RAGGED", ragged), split);
                kernels.push((&attention::forward::FORWARD, constants));
            }
            for head_dim in dims {
                let config = AttentionConfig { head_dim, value_dim, method, ..Default::default() };
                for kernel in [&attention::backward::OUTPUTS, &attention::backward::DQ, &attention::backward::DKV] {
                    for ragged in [0, 1] {
                        kernels.push((kernel, attention::backward::constants(&config, ("RAGGED", ragged))));
                    }
                }
            }
        }
    }
    for key_dim in dims {
        for (gated, ragged) in [(false, false), (true, false), (false, true), (true, true)] {
            // Packed sequences change nothing that depends on the chunk.
            for chunk in if ragged { &[32][..] } else { &[16, 32, 64] } {
                for grouped in [false, !ragged] {
                    let build = Build { chunk: *chunk, key_dim, gated, ragged, lanes: false, grouped };
                    kernels.extend(build.kernels(Form::Chunked));
                    let backward = efla::backward::kernels(build);
                    kernels.extend(backward.into_iter().map(|(_, kernel, constants)| (kernel, constants)));
                }
            }
            for (subgroup, emulated) in [(16, false), (32, false), (64, false), (32, true)] {
                let build = Build { chunk: 32, key_dim, gated, ragged, lanes: false, grouped: false };
                let matrices = Matrices { subgroup, emulated };
                for (general, constants) in
                    [(&efla::forward::PREPARE, build.prepare(false)), (&efla::forward::OUTPUT, build.products())]
                {
                    kernels.push(efla::matrix::kernel(matrices, general, constants));
                }
            }
            if !gated {
                let build = Build { chunk: 32, key_dim, gated, ragged, lanes: true, grouped: false };
                kernels.extend(build.kernels(Form::Chunked));
                let backward = efla::backward::kernels(build);
                kernels.extend(backward.into_iter().map(|(_, kernel, constants)| (kernel, constants)));
            }
            kernels.extend(
                Build { chunk: 64, key_dim, gated, ragged, lanes: false, grouped: false }.kernels(Form::Recurrent),
            );
        }
    }
    // Many do not depend on every choice above.
    let mut seen = HashSet::new();
    kernels.retain(|(kernel, constants)| seen.insert((kernel.name, constants.clone())));
    kernels
}

/// Every variant that tests check: either access mode, every storage type, rows read whole and not.
fn variants() -> impl Iterator<Item = Variant> {
    kernels().into_iter().flat_map(|(kernel, constants)| {
        // A table is a buffer of its own: never written, so that browsers take what depends on it as uniform.
        let may_be_written = |binding: &Binding| binding.role == Role::Input && binding.kind != Kind::Words;
        let inputs = kernel.bindings.iter().enumerate().filter(|(_, binding)| may_be_written(binding));
        let all_inputs = inputs.fold(0, |mask, (index, _)| mask | 1 << index);
        let formats = [(DType::F32, true), (DType::F16, false), (DType::F16, true), (DType::BF16, true)];
        let formats = formats.map(|(dtype, vectors)| (0, Format { dtype, vectors }));
        let f32 = [(0, Format::default()), (all_inputs, Format::default())];
        let each = f32.into_iter().chain(formats);
        each.map(move |(writable_inputs, format)| variant(kernel, constants.clone(), writable_inputs, format))
    })
}

/// With the environment variable `WRITE_VARIANTS` also writes them to that file, a line of JSON each, for a browser's
/// compiler: {"name": …, "text": …}.
#[test]
fn declarations_match_the_host() {
    let mut file = std::env::var_os("WRITE_VARIANTS").map(|path| BufWriter::new(File::create(path).unwrap()));
    let mut checked = 0;
    for variant in variants() {
        check(&variant);
        checked += 1;
        // Browsers have neither barriers of a subgroup nor matrix units: what needs them never runs there.
        if let Some(file) = file.as_mut().filter(|_| needs(&variant) == Needs::Nothing) {
            let Variant { kernel, constants, writable_inputs, formats } = &variant;
            let constants: String = constants.iter().map(|(name, value)| format!(" {name}={value}")).collect();
            let stored = kernel.bindings.iter().position(Binding::is_stored).map(|index| formats[index]);
            let name = format!("{}{constants} writable={writable_inputs} {stored:?}", kernel.name);
            let text = compose(&variant).text;
            writeln!(file, r#"{{"name": {}, "text": {}}}"#, json(&name), json(&text)).unwrap();
        }
    }
    assert!(checked > 1500, "{checked}");
}

fn json(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n").replace('\t', "\\t"))
}

/// A variant whose stored bindings all have one format.
fn variant(kernel: &'static Kernel, constants: Constants, writable_inputs: u32, format: Format) -> Variant {
    let formats = kernel.bindings.iter().map(|binding| if binding.is_stored() { format } else { Format::default() });
    Variant { kernel, constants, writable_inputs, formats: formats.collect() }
}

fn check(variant: &Variant) {
    let name = variant.kernel.name;
    let composed = compose(variant);
    let module = naga::front::wgsl::parse_str(&composed.text)
        .unwrap_or_else(|error| panic!("{name}: {}", composed.locate(&error.emit_to_string(&composed.text))));
    // No optional capability, so that every adapter can run the variant; but for the kernels with a twin that needs none.
    let halves = Capabilities::SHADER_FLOAT16 | Capabilities::SUBGROUP;
    let capabilities = match needs(variant) {
        Needs::Nothing => Capabilities::empty(),
        Needs::Subgroups => Capabilities::SUBGROUP | Capabilities::SUBGROUP_BARRIER,
        Needs::Matrices => halves | Capabilities::COOPERATIVE_MATRIX,
        Needs::Halves => halves,
    };
    Validator::new(ValidationFlags::all(), capabilities)
        .validate(&module)
        .unwrap_or_else(|error| panic!("{name} {:?}: {error:?}", variant.constants));
    let mut layouter = Layouter::default();
    layouter.update(module.to_ctx()).unwrap();

    let mut workgroup_bytes = 0;
    let mut declared = Vec::new();
    for (_, variable) in module.global_variables.iter() {
        if variable.space == AddressSpace::WorkGroup {
            workgroup_bytes += layouter[variable.ty].size;
        }
        if let Some(binding) = &variable.binding {
            assert_eq!(binding.group, 0, "{name}");
            declared.push((binding.binding, variable));
        }
    }
    declared.sort_by_key(|(binding, _)| *binding);

    // Binding 0 is the parameters: same names, same offsets, same size.
    let (binding, params) = &declared[0];
    assert_eq!((*binding, &params.space), (0, &AddressSpace::Uniform), "{name}");
    let TypeInner::Struct { members, span } = &module.types[params.ty].inner else { panic!("{name}: params") };
    assert_eq!(*span as usize, variant.kernel.params.size, "{name}: the sizes of the parameters differ");
    assert_eq!(members.len(), variant.kernel.params.fields.len(), "{name}");
    for (member, (field, _, offset)) in members.iter().zip(variant.kernel.params.fields) {
        assert_eq!(member.name.as_deref(), Some(*field), "{name}");
        assert_eq!(member.offset as usize, *offset, "{name}.{field}: the offsets differ");
    }

    // The others are the storage buffers of the binding table, with the access it says.
    assert_eq!(declared.len() - 1, variant.kernel.bindings.len(), "{name}");
    assert!(variant.kernel.bindings.len() <= MAX_STORAGE_BUFFERS as usize, "{name}");
    for (index, (expected, (binding, variable))) in variant.kernel.bindings.iter().zip(&declared[1..]).enumerate() {
        assert_eq!(*binding as usize, index + 1, "{name}");
        assert_eq!(variable.name.as_deref(), Some(expected.name), "{name}");
        let writable = expected.role != Role::Input || variant.writable_inputs & (1 << index) != 0;
        let access = if writable { StorageAccess::LOAD | StorageAccess::STORE } else { StorageAccess::LOAD };
        assert_eq!(variable.space, AddressSpace::Storage { access }, "{name}.{}", expected.name);
    }

    // What an adapter with default limits offers; chunks of 64 tokens, tiles of 64 rows and matrix units say what they need.
    let constant =
        |wanted| variant.constants.iter().find(|(name, _)| *name == wanted).map(|(_, value)| *value as usize);
    let (limit, most) = match needs(variant) {
        Needs::Matrices | Needs::Halves => (MATRIX_WORKGROUP_BYTES, MATRIX_INVOCATIONS),
        _ if constant("CHUNK") == Some(64) => (efla::forward::workgroup_bytes(64), MIN_INVOCATIONS),
        _ if constant("BLOCK_Q") == Some(64) => (attention::forward::workgroup_bytes(64), MIN_INVOCATIONS),
        _ => (MIN_WORKGROUP_BYTES, MIN_INVOCATIONS),
    };
    assert!(workgroup_bytes <= limit, "{name} {:?}: {workgroup_bytes} bytes", variant.constants);
    let invocations: u32 = module.entry_points[0].workgroup_size.iter().product();
    assert!(invocations <= most, "{name}: {invocations} invocations");
}

/// Every kernel with all its constants, through naga's writers of what the backends compile, with wgpu's options: SPIR-V
/// for Vulkan, MSL for Metal, HLSL for DX12, GLSL for OpenGL. Without wgpu's guards, and with them where inputs are
/// writable; of the variants with 16 bits every seventh, since they differ in nothing but loads and stores.
#[test]
fn every_backend_takes_every_variant() {
    let mut seen = HashSet::new();
    let mut written = [0; 4];
    let is_half = |variant: &Variant| variant.formats.iter().any(|format| format.dtype != DType::F32);
    for (index, variant) in variants().enumerate() {
        let name = variant.kernel.name;
        if is_half(&variant) && index % 7 != 0 {
            continue;
        }
        let text = compose(&variant).text;
        if !seen.insert(text.clone()) {
            continue;
        }
        let needs = needs(&variant);
        let module = naga::front::wgsl::parse_str(&text).unwrap();
        let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module).unwrap();
        let checked = variant.writable_inputs != 0;
        written[0] += 1;
        spirv(&module, &info, checked, needs).unwrap_or_else(|error| panic!("{name} to SPIR-V: {error}"));
        written[1] += 1;
        msl(&module, &info, checked, needs, &variant).unwrap_or_else(|error| panic!("{name} to MSL: {error}"));
        // naga writes no cooperative matrices in these languages, and wgpu offers none.
        if matches!(needs, Needs::Nothing | Needs::Subgroups) {
            written[2] += 1;
            hlsl(&module, &info, checked, needs).unwrap_or_else(|error| panic!("{name} to HLSL: {error}"));
        }
        // wgpu offers no subgroups on OpenGL: `Gpu::lanes` is false there.
        if needs == Needs::Nothing {
            written[3] += 1;
            glsl(&module, &info, checked).unwrap_or_else(|error| panic!("{name} to GLSL: {error}"));
        }
    }
    println!("{written:?} in SPIR-V, MSL, HLSL, GLSL");
    assert!(written.iter().all(|count| *count > 1000), "{written:?}");
}

fn policies(checked: bool) -> BoundsCheckPolicies {
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    BoundsCheckPolicies { index: policy, buffer: policy, ..Default::default() }
}

/// Every binding of the module and what it becomes, `(space, place in the group)`.
fn bindings<T>(module: &naga::Module, target: impl Fn(AddressSpace, u32) -> T) -> BTreeMap<naga::ResourceBinding, T> {
    let bound = module.global_variables.iter();
    bound.filter_map(|(_, variable)| variable.binding.map(|at| (at, target(variable.space, at.binding)))).collect()
}

fn spirv(module: &naga::Module, info: &ModuleInfo, checked: bool, needs: Needs) -> Result<(), String> {
    use naga::back::spv;
    let mut capabilities = vec![spv::Capability::Shader, spv::Capability::Matrix];
    if needs != Needs::Nothing {
        capabilities.extend([
            spv::Capability::GroupNonUniform,
            spv::Capability::GroupNonUniformVote,
            spv::Capability::GroupNonUniformArithmetic,
            spv::Capability::GroupNonUniformBallot,
            spv::Capability::GroupNonUniformShuffle,
            spv::Capability::GroupNonUniformShuffleRelative,
            spv::Capability::GroupNonUniformQuad,
        ]);
    }
    if matches!(needs, Needs::Matrices | Needs::Halves) {
        capabilities.extend([
            spv::Capability::Float16,
            spv::Capability::StorageBuffer16BitAccess,
            spv::Capability::UniformAndStorageBuffer16BitAccess,
        ]);
    }
    if needs == Needs::Matrices {
        capabilities.extend([spv::Capability::CooperativeMatrixKHR, spv::Capability::VulkanMemoryModel]);
    }
    let options = spv::Options {
        // Of Vulkan 1.0; there are subgroups from 1.1 on, cooperative matrices from 1.3 on.
        lang_version: match needs {
            Needs::Nothing => (1, 0),
            Needs::Subgroups | Needs::Halves => (1, 3),
            Needs::Matrices => (1, 6),
        },
        flags: spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE,
        fake_missing_bindings: false,
        binding_map: bindings(module, |_, binding| spv::BindingInfo {
            descriptor_set: 0,
            binding,
            binding_array_size: None,
        }),
        capabilities: Some(capabilities.into_iter().collect()),
        bounds_check_policies: policies(checked),
        zero_initialize_workgroup_memory: match checked {
            true => spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
            false => spv::ZeroInitializeWorkgroupMemoryMode::None,
        },
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".to_string() };
    let words = spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|error| error.to_string())?;
    assert_eq!(words[0], 0x0723_0203);
    Ok(())
}

fn msl(module: &naga::Module, info: &ModuleInfo, checked: bool, needs: Needs, variant: &Variant) -> Result<(), String> {
    use naga::back::msl;
    let resources = bindings(module, |space, binding| msl::BindTarget {
        buffer: Some(binding as u8),
        mutable: matches!(space, AddressSpace::Storage { access } if access.contains(StorageAccess::STORE)),
        ..Default::default()
    });
    let resources = msl::EntryPointResources {
        resources,
        immediates_buffer: None,
        sizes_buffer: Some(variant.kernel.bindings.len() as u8 + 1),
    };
    let options = msl::Options {
        // The oldest that wgpu's features ask for.
        lang_version: if needs == Needs::Nothing { (2, 0) } else { (2, 4) },
        per_entry_point_map: [("main".to_string(), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        bounds_check_policies: policies(checked),
        zero_initialize_workgroup_memory: checked,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, "main".to_string())),
        vertex_pulling_transform: true,
        ..Default::default()
    };
    let (_, translated) = msl::write_string(module, info, &options, &pipeline).map_err(|error| error.to_string())?;
    translated.entry_point_names.into_iter().try_for_each(|name| name.map(drop).map_err(|error| error.to_string()))
}

fn hlsl(module: &naga::Module, info: &ModuleInfo, checked: bool, needs: Needs) -> Result<(), String> {
    use naga::back::hlsl;
    let options = hlsl::Options {
        // What FXC, which every Windows has, can do; subgroups need DXC.
        shader_model: if needs == Needs::Subgroups { hlsl::ShaderModel::V6_0 } else { hlsl::ShaderModel::V5_1 },
        binding_map: bindings(module, |_, register| hlsl::BindTarget {
            register,
            restrict_indexing: checked,
            ..Default::default()
        }),
        fake_missing_bindings: false,
        special_constants_binding: Some(hlsl::BindTarget { space: 1, ..Default::default() }),
        zero_initialize_workgroup_memory: checked,
        restrict_indexing: checked,
        force_loop_bounding: checked,
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions { entry_point: Some((naga::ShaderStage::Compute, "main".to_string())) };
    let mut text = String::new();
    let translated = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    let names = translated.map_err(|error| error.to_string())?.entry_point_names;
    names.into_iter().try_for_each(|name| name.map(drop).map_err(|error| error.to_string()))
}

fn glsl(module: &naga::Module, info: &ModuleInfo, checked: bool) -> Result<(), String> {
    use naga::back::glsl;
    let version = if checked { glsl::Version::new_gles(310) } else { glsl::Version::Desktop(430) };
    let options = glsl::Options {
        version,
        binding_map: bindings(module, |space, binding| match space {
            AddressSpace::Uniform => binding as u8,
            _ => binding as u8 - 1,
        }),
        writer_flags: glsl::WriterFlags::ADJUST_COORDINATE_SPACE | glsl::WriterFlags::FORCE_POINT_SIZE,
        zero_initialize_workgroup_memory: checked,
    };
    let pipeline = glsl::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: "main".to_string(),
        multiview: None,
    };
    let mut text = String::new();
    glsl::Writer::new(&mut text, module, info, &options, &pipeline, policies(false))
        .and_then(|mut writer| writer.write())
        .map(drop)
        .map_err(|error| format!("{version:?}: {error}"))
}

/// Bindings that a kernel declares but never reads would hide a mistake in the table.
#[test]
fn every_binding_is_used() {
    for (kernel, _) in kernels() {
        for binding in kernel.bindings {
            // A stored binding is reached through its functions only.
            let name = format!("{}{}", binding.name, if binding.is_stored() { "_" } else { "[" });
            let used = kernel.files.iter().any(|file| file.text.contains(&name));
            assert!(used, "{}: {} is bound and not used", kernel.name, binding.name);
        }
    }
}

#[test]
fn messages_name_the_file() {
    let variant = variant(&attention::operands::PACK, vec![], 0, Format::default());
    let composed = compose(&variant);
    let line = 1 + composed.text.lines().position(|line| line.contains("fn main")).unwrap();
    let own = 1 + variant.kernel.files[1].text.lines().position(|line| line.contains("fn main")).unwrap();
    assert_eq!(composed.locate(&format!("error at wgsl:{line}:4")), format!("error at pack.wgsl:{own}:4"));
    assert_eq!(composed.locate("wgsl:1:1"), "generated prelude:1:1");
}

/// Multiplications and loads from workgroup memory in the statements of a block, but for the loops within, which are
/// given to `found` by themselves. A load counts once however wide it is, a product of vectors once a component.
fn count_work(module: &naga::Module, block: &naga::Block, found: &mut Vec<[u32; 2]>) -> [u32; 2] {
    use naga::{BinaryOperator, Expression, MathFunction, Statement};
    let main = &module.entry_points[0].function;
    let mut info = naga::front::Typifier::new();
    let context = naga::proc::ResolveContext::with_locals(module, &main.local_variables, &main.arguments);
    let mut counts = [0, 0];
    for statement in block {
        let mut add = |more: [u32; 2]| counts = [counts[0] + more[0], counts[1] + more[1]];
        match statement {
            Statement::Emit(range) => {
                for handle in range.clone() {
                    match main.expressions[handle] {
                        Expression::Math { fun: MathFunction::Dot, .. } => add([4, 0]),
                        Expression::Binary { op: BinaryOperator::Multiply, .. } => {
                            info.grow(handle, &main.expressions, &context).unwrap();
                            match info.get(handle, &module.types) {
                                TypeInner::Vector { size, scalar } if scalar.kind == naga::ScalarKind::Float => {
                                    add([*size as u32, 0])
                                }
                                _ => {}
                            }
                        }
                        Expression::Load { mut pointer } => {
                            while let Expression::Access { base, .. } | Expression::AccessIndex { base, .. } =
                                main.expressions[pointer]
                            {
                                pointer = base;
                            }
                            if let Expression::GlobalVariable(variable) = main.expressions[pointer]
                                && module.global_variables[variable].space == AddressSpace::WorkGroup
                            {
                                add([0, 1]);
                            }
                        }
                        _ => {}
                    }
                }
            }
            Statement::Block(block) => add(count_work(module, block, found)),
            Statement::If { accept, reject, .. } => {
                add(count_work(module, accept, found));
                add(count_work(module, reject, found));
            }
            Statement::Loop { body, .. } => {
                let work = count_work(module, body, found);
                found.push(work);
            }
            _ => {}
        }
    }
    counts
}

/// The two loops of the forward pass that do its products have work for the arithmetic units of a GPU: at least 4
/// multiplications a load from workgroup memory.
#[test]
fn multiplications_a_load() {
    for method in [Method::Continuous, Method::Softmax] {
        let constants = attention::forward::constants(method, 128, 32, ("RAGGED", 0), false);
        let text = compose(&variant(&attention::forward::FORWARD, constants, 0, Format::default())).text;
        let module = naga::front::wgsl::parse_str(&text).unwrap();
        let mut loops = Vec::new();
        count_work(&module, &module.entry_points[0].function.body, &mut loops);
        let products: Vec<_> = loops.iter().filter(|[products, _]| *products >= 64).collect();
        assert_eq!(products.len(), 2, "{loops:?}");
        for [products, loads] in products {
            assert!(*loads > 0 && products / loads >= 4, "{products} multiplications, {loads} loads");
        }
    }
}

/// Loops that are written out keep the lines of their file, and take counts from constants.
#[test]
fn loops_written_out() {
    let text = "a\n//# for i in N\n//# for c in x y\nb$i$c\n//# end\n//# end\nc";
    let lines: Vec<_> = text.lines().enumerate().map(|(at, line)| (at + 1, line)).collect();
    let mut out = Vec::new();
    super::unroll(&lines, &vec![("N", 2)], &mut out);
    let out: Vec<_> = out.iter().map(|(line, text)| format!("{line} {text}")).collect();
    assert_eq!(out, ["1 a", "4 b0x", "4 b0y", "4 b1x", "4 b1y", "7 c"]);
}
