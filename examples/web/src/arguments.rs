//! Named arguments out of a JavaScript object.

use continuous_attention::Result;
use js_sys::{Float32Array, Object, Reflect};
use wasm_bindgen::{JsCast, JsValue};

use crate::refused;

/// An object whose fields are arguments; a field that is missing, `undefined` or `null` was not given.
pub struct Arguments<'a>(&'a Object);

impl<'a> Arguments<'a> {
    /// Refuses fields of other names: a misspelt option would be ignored.
    pub fn new(object: &'a Object, known: &[&str]) -> Result<Self> {
        let names = Object::keys(object).into_iter().filter_map(|name| name.as_string());
        for name in names {
            if !known.contains(&name.as_str()) {
                return Err(refused(&name, "an unknown argument", known.join(", ")));
            }
        }
        Ok(Arguments(object))
    }

    fn get(&self, name: &str) -> Option<JsValue> {
        Reflect::get(self.0, &name.into()).ok().filter(|value| !value.is_undefined() && !value.is_null())
    }

    pub fn floats(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.dyn_ref::<Float32Array>() {
            Some(array) => Ok(Some(array.to_vec())),
            None => Err(refused(name, kind(&value), "a Float32Array")),
        }
    }

    pub fn needed(&self, name: &str) -> Result<Vec<f32>> {
        self.floats(name)?.ok_or_else(|| refused(name, "nothing", "a Float32Array"))
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| refused(name, kind(&value), "a number"))
    }

    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        match self.number(name)? {
            None => Ok(None),
            // What fits in a float64's whole numbers and in 32 bits.
            Some(number) if number >= 0.0 && number.fract() == 0.0 && number <= f64::from(u32::MAX) => {
                Ok(Some(number as usize))
            }
            Some(number) => Err(refused(name, number, "a whole number that is not negative")),
        }
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| refused(name, kind(&value), "true or false"))
    }

    /// One of several words.
    pub fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let text = value.as_string().unwrap_or_else(|| kind(&value));
        match choices.iter().find(|(word, _)| *word == text) {
            Some(&(_, choice)) => Ok(Some(choice)),
            None => Err(refused(name, text, choices.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", "))),
        }
    }
}

/// What kind of value it is, in JavaScript's own word.
fn kind(value: &JsValue) -> String {
    let class = value.dyn_ref::<Object>().map(|object| String::from(object.constructor().name()));
    class.unwrap_or_else(|| value.js_typeof().as_string().unwrap_or_default())
}

/// `values` as rows: how many there are, given that each has `length` elements and that they come `group` at a time.
pub fn rows(name: &str, values: &[f32], group: usize, length: usize) -> Result<usize> {
    match group.checked_mul(length) {
        Some(0) if values.is_empty() => Ok(0),
        Some(unit) if unit > 0 && values.len().is_multiple_of(unit) => Ok(values.len() / unit),
        _ => Err(refused(name, format!("{} elements", values.len()), format!("a multiple of {group} × {length}"))),
    }
}
