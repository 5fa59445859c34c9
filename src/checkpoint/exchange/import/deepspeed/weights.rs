//! The model's part of the tree: names in the order of its state dict, fp32 weights from the
//! ranks' vectors in place of the 16-bit ones, and all else as the model's file has it.

use std::collections::HashMap;

use drivetrain_formats::pickle::Value;
use drivetrain_formats::torch::{Key, path_json};
use serde_json::{Map, Value as Json};

use super::build::{Ranks, add_cuts, inside};
use super::cuts::{Cut, interleaved, share};
use super::file::{File, Vector, get};
use super::folder::Files;
use super::model::{Model, Param};
use super::shard::keep;
use crate::checkpoint::exchange::import::{Found, state};
use crate::checkpoint::layout::elements;
use crate::error::Result;

/// Parts of parameters that are not trained, from the second rank on (stage 3).
pub type Parts = HashMap<String, Vec<Vector>>;

/// The parts that a file has.
fn parts_of(file: &File<'_>, root: Value<'_>) -> Result<Vec<(String, Vector)>> {
    let Some(fragments) = get(root, "frozen_param_fragments") else { return Ok(Vec::new()) };
    let part = |(name, value): (&str, Value<'_>)| {
        let tensor = file.tensor(value)?.ok_or_else(|| file.bad("a tensor", value.kind()))?;
        Ok((name.to_string(), file.vector(name, &tensor)?))
    };
    file.names(fragments, "of frozen parameters")?.into_iter().map(part).collect()
}

/// Reads them from the files of all ranks but the first.
pub async fn read_parts(files: &Files, names: &[String], found: &mut Found) -> Result<Parts> {
    let mut all = Parts::new();
    for name in names.iter().skip(1) {
        let (file, pickle) = File::open(files, name, found).await?;
        let parts = parts_of(&file, pickle.root())?;
        if parts.is_empty() {
            // Nothing is read from it, so it need not stay open.
            found.files.pop();
        }
        for (name, part) in parts {
            all.entry(name).or_default().push(part);
        }
    }
    Ok(all)
}

/// What the tree is made of.
pub struct Weights<'a> {
    /// Where the state begins.
    pub at: &'a [Key],
    /// The ranks' vectors.
    pub ranks: &'a Ranks,
    /// Names and shapes.
    pub model: &'a Model,
    /// Parts of what is not trained.
    pub parts: Parts,
    /// The tree.
    pub tree: Map<String, Json>,
    /// What has no form here, with the reason.
    pub left_out: &'a mut Map<String, Json>,
}

impl Weights<'_> {
    fn path(&self, name: &str) -> Vec<Key> {
        inside(self.at, &["model", name])
    }

    fn put(&mut self, name: &str, node: Json) {
        self.tree.insert(state::object_key(&Key::Text(name.into())), node);
    }

    fn has(&self, name: &str) -> bool {
        self.tree.contains_key(&state::object_key(&Key::Text(name.into())))
    }

    /// Fills the tree.
    pub fn read(&mut self, file: &mut File<'_>, root: Value<'_>) -> Result<()> {
        let model = self.model;
        let params: HashMap<&str, &Param> =
            model.params.iter().map(|p| (p.name.as_str(), p)).collect();
        let frozen: HashMap<&str, &[i64]> =
            model.frozen.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let known = |name: &str| params.contains_key(name) || frozen.contains_key(name);
        let aliases: HashMap<&str, &str> = model
            .aliases
            .iter()
            .filter(|(_, of)| known(of))
            .map(|(name, of)| (name.as_str(), of.as_str()))
            .collect();
        let module = file.names(file.need(root, "module")?, "of weights")?;
        let mut names: Vec<&str> = module.iter().map(|(name, _)| *name).collect();
        let here: HashMap<&str, Value<'_>> = module.into_iter().collect();
        names.extend(model.params.iter().map(|p| p.name.as_str()));
        names.extend(model.frozen.iter().map(|(name, _)| name.as_str()));
        // A name that is another one comes after that one.
        names.extend(model.aliases.iter().map(|(name, _)| name.as_str()));
        names.extend(model.aliases.iter().map(|(name, _)| name.as_str()));
        for name in names {
            if self.has(name) {
                continue;
            }
            if let Some(param) = params.get(name) {
                let node = self.ranks.add_weight(file.tensors.found, &self.path(name), param)?;
                self.put(name, node);
            } else if let Some(shape) = frozen.get(name) {
                self.frozen(file, root, name, shape)?;
            } else if let Some(of) = aliases.get(name) {
                self.alias(name, of);
            } else if let Some(value) = here.get(name) {
                self.kept(file, name, *value)?;
            }
        }
        Ok(())
    }

    fn alias(&mut self, name: &str, of: &str) {
        let first = self.tree.get(&state::object_key(&Key::Text(of.into())));
        let Some(mut node) = first.cloned() else { return };
        let at: Json = serde_json::from_str(&path_json(&self.path(of))).unwrap_or_default();
        node["~tensor"]["at"] = at;
        self.put(name, node);
    }

    /// A buffer, or a parameter that no optimizer has, as it is.
    fn kept(&mut self, file: &mut File<'_>, name: &str, value: Value<'_>) -> Result<()> {
        let placeholder = self.ranks.shards[0].stage == 3
            && !self.model.buffers.contains(name)
            && file.tensor(value)?.is_some_and(|t| t.elements() == 0);
        if placeholder {
            let key = state::object_key(&Key::Text(format!("model.{name}")));
            self.left_out.insert(key, "its elements are not in the folder".into());
            return Ok(());
        }
        let at = inside(self.at, &["model"]);
        keep(file, (name, value), &at, &mut self.tree, self.left_out)
    }

    fn frozen(
        &mut self,
        file: &mut File<'_>,
        root: Value<'_>,
        name: &str,
        shape: &[i64],
    ) -> Result<()> {
        let fragments = file.need(root, "frozen_param_fragments")?;
        let value = file.need(fragments, name)?;
        let Some(tensor) = file.tensor(value)? else {
            return Err(file.bad(format!("a tensor for {name}"), value.kind()));
        };
        let head = &self.ranks.shards[0];
        if head.stage < 3 {
            if tensor.shape != shape {
                return Err(file.bad(format!("{name} of {shape:?}"), format!("{:?}", tensor.shape)));
            }
            let at = inside(self.at, &["model"]);
            return keep(file, (name, value), &at, &mut self.tree, self.left_out);
        }
        let count = elements(shape).unwrap_or(0) as u64;
        let own = share(count, head.world);
        let mut parts = vec![file.vector(name, &tensor)?];
        parts.extend(self.parts.get(name).into_iter().flatten());
        let alike = parts.iter().all(|p| p.len == own && p.dtype == tensor.dtype);
        if !alike || parts.len() as u64 != head.world {
            let expected = format!("{} parts of {own} elements of {name}", head.world);
            let found: Vec<u64> = parts.iter().map(|p| p.len).collect();
            return Err(file.bad(expected, format!("{found:?}")));
        }
        let cuts: Vec<(Cut, Vector)> = interleaved(&[own], head.world, 0, count)
            .into_iter()
            .map(|cut| (cut, parts[cut.rank]))
            .collect();
        let path = self.path(name);
        let node = add_cuts(file.tensors.found, &path, shape, tensor.dtype, &cuts)?;
        self.put(name, node);
        Ok(())
    }
}
