//! `bindgen MODULE.wasm FOLDER`: writes the JavaScript around a module, as wasm-bindgen's own command line does with
//! `--target web`, which needs many more crates.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [module, folder] = std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "MODULE.wasm FOLDER")?;
    let mut bindgen = wasm_bindgen_cli_support::Bindgen::new();
    bindgen.input_path(module).omit_default_module_path(false).web(true)?;
    bindgen.typescript(true).remove_name_section(true).remove_producers_section(true).generate(folder)?;
    Ok(())
}
