//! The tree of values that an import makes of the parts, and its pieces.

use std::collections::HashMap;

use drivetrain_formats::torch::{Key, Stored, path_json};
use serde_json::{Map, Value as Json, json};

use super::cuts::{Cut, consecutive, interleaved};
use super::file::Vector;
use super::model::{Model, Param};
use super::shard::{Common, Shard, Slot};
use crate::checkpoint::exchange::import::Found;
use crate::checkpoint::exchange::import::feed::Span;
use crate::checkpoint::exchange::import::state::{object_key, stored_dtype, tensor_node};
use crate::checkpoint::flat::flat_range;
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};

/// The ranks' files, with their names.
pub struct Ranks {
    /// What each has.
    pub shards: Vec<Shard>,
    /// Their names.
    pub names: Vec<String>,
}

/// `path` below the keys `at`.
pub fn inside(at: &[Key], path: &[&str]) -> Vec<Key> {
    let more = path.iter().map(|key| Key::Text((*key).into()));
    at.iter().cloned().chain(more).collect()
}

/// Adds a tensor whose elements lie in several vectors.
pub fn add_cuts(
    found: &mut Found,
    path: &[Key],
    shape: &[i64],
    dtype: Stored,
    cuts: &[(Cut, Vector)],
) -> Result<Json> {
    let (stored, more) = stored_dtype(dtype)?;
    let shown = path_json(path);
    if more.is_some() {
        return Err(Error::Unsupported {
            what: format!("tensor {shown} of {}", dtype.torch),
            advice: "load it in DeepSpeed and save it through a Checkpointer".into(),
        });
    }
    for (cut, vector) in cuts {
        let count = shape.iter().product::<i64>();
        let whole = cut.start == 0 && cut.len as i64 == count;
        let rect =
            if whole { Rect::whole(shape) } else { flat_range(cut.start as i64, cut.len as i64) };
        let span = Span::Range { file: vector.file, start: vector.start + cut.at * dtype.bytes };
        found.add(&shown, stored, shape, rect, span)?;
    }
    if cuts.is_empty() {
        found.add(&shown, stored, shape, Rect::whole(shape), Span::Inline(Vec::new()))?;
    }
    found.tensors += 1;
    Ok(tensor_node(dtype, shape))
}

impl Ranks {
    fn head(&self) -> &Shard {
        &self.shards[0]
    }

    /// Where the elements of a parameter are among the ranks' vectors.
    fn cuts(&self, param: &Param) -> Vec<Cut> {
        let head = self.head();
        if head.stage == 3 {
            let lens: Vec<u64> = head.masters.iter().map(|v| v.len).collect();
            return interleaved(&lens, head.world, param.first, param.count);
        }
        let lens: Vec<u64> = self.shards.iter().map(|s| s.masters[param.vector].len).collect();
        consecutive(&lens, param.vector, param.first, param.count)
    }

    /// Adds the fp32 weights of a parameter.
    pub fn add_weight(&self, found: &mut Found, path: &[Key], param: &Param) -> Result<Json> {
        let cuts = self.cuts(param).into_iter();
        let placed: Vec<_> =
            cuts.map(|cut| (cut, self.shards[cut.rank].masters[cut.vector])).collect();
        let dtype = self
            .head()
            .masters
            .get(param.vector)
            .map_or_else(|| placed.first().map(|(_, v)| v.dtype), |vector| Some(vector.dtype));
        let dtype = dtype.ok_or_else(|| self.bad(0, "a vector of each group", "fewer"))?;
        add_cuts(found, path, &param.shape, dtype, &placed)
    }

    fn bad(&self, rank: usize, expected: impl ToString, found: impl ToString) -> Error {
        let advice = "the file is damaged or of another save: use an older checkpoint";
        let (expected, found) = (expected.to_string(), found.to_string());
        Error::corrupt(&self.names[rank], 0, expected, found, advice)
    }

    fn flat(&self, cut: &Cut, key: &str) -> Result<Vector> {
        let shard = &self.shards[cut.rank];
        let slot = shard.states[cut.vector].iter().find(|(name, _)| name == key);
        match slot {
            Some((_, Slot::Flat(vector))) if vector.len >= cut.at + cut.len => Ok(*vector),
            _ => {
                let expected = format!("{key:?} of vector {} as rank 0 has it", cut.vector);
                Err(self.bad(cut.rank, expected, "none of that size"))
            }
        }
    }

    /// Adds what the optimizer keeps for a parameter.
    fn add_state(&self, found: &mut Found, at: &[Key], param: &Param) -> Result<Option<Json>> {
        let cuts = self.cuts(param);
        let vector = cuts.first().map_or(param.vector, |cut| cut.vector);
        let slots = self.head().states.get(vector).map_or(&[][..], Vec::as_slice);
        let mut node = Map::new();
        for (key, slot) in slots {
            let path = inside(at, &["optimizer", "state", &param.name, key]);
            let value = match slot {
                Slot::Plain(value) => value.clone(),
                Slot::Small(dtype, shape, bytes) => {
                    let (stored, more) = stored_dtype(*dtype)?;
                    let sizes: Vec<i64> = shape.iter().copied().chain(more).collect();
                    let (rect, span) = (Rect::whole(&sizes), Span::Inline(bytes.clone()));
                    found.add(&path_json(&path), stored, &sizes, rect, span)?;
                    found.tensors += 1;
                    tensor_node(*dtype, shape)
                }
                Slot::Flat(first) => {
                    let placed: Result<Vec<_>> =
                        cuts.iter().map(|cut| Ok((*cut, self.flat(cut, key)?))).collect();
                    let placed = placed?;
                    if placed.iter().any(|(_, v)| v.dtype != first.dtype) {
                        return Err(self.bad(0, format!("{key:?} of one type"), "several"));
                    }
                    add_cuts(found, &path, &param.shape, first.dtype, &placed)?
                }
            };
            node.insert(object_key(&Key::Text(key.clone())), value);
        }
        Ok((!node.is_empty()).then_some(Json::Object(node)))
    }

    /// The optimizer's state by names of parameters, as `Optimizer.state_dict` has it by numbers.
    pub fn optimizer(
        &self,
        found: &mut Found,
        at: &[Key],
        model: &Model,
        common: &mut Common,
    ) -> Result<Json> {
        let mut state = Map::new();
        for param in &model.params {
            if let Some(node) = self.add_state(found, at, param)? {
                state.insert(object_key(&Key::Text(param.name.clone())), node);
            }
        }
        let mut by_vector: HashMap<usize, Vec<&str>> = HashMap::new();
        for param in &model.params {
            by_vector.entry(param.vector).or_default().push(&param.name);
        }
        let mut groups = Vec::new();
        for group in std::mem::take(&mut common.groups) {
            let names = group.vectors.iter().flat_map(|v| by_vector.get(v).into_iter().flatten());
            let mut settings = group.settings;
            settings.insert("params".into(), names.copied().collect::<Vec<_>>().into());
            groups.push(Json::Object(settings));
        }
        if groups.is_empty() {
            let own = |v: usize| json!({"params": by_vector.get(&v).cloned().unwrap_or_default()});
            groups = (0..self.head().masters.len()).map(own).collect();
        }
        Ok(json!({"state": state, "param_groups": groups}))
    }
}
