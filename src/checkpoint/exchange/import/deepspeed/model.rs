//! The file with the model's own state: which parameters lie where in the flat vectors, their
//! shapes, what is not trained, and values of the training.

use std::collections::{HashMap, HashSet};

use drivetrain_formats::pickle::Value;

use super::cuts::share;
use super::file::{File, entries, get, shape};
use super::shard::Shard;
use crate::checkpoint::layout::elements;
use crate::error::{Error, Result};

/// A parameter that the optimizer trains.
#[derive(Debug, Clone)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Number of elements.
    pub count: u64,
    /// Number of its vector; in stage 3 that of its group, which may go on in the next.
    pub vector: usize,
    /// First element in the vector; in stage 3, in all vectors of a rank.
    pub first: u64,
}

/// What the file says about names.
#[derive(Debug, Default)]
pub struct Model {
    /// The trained parameters, in the order of the vectors.
    pub params: Vec<Param>,
    /// Parameters that are not trained, with their shapes.
    pub frozen: Vec<(String, Vec<i64>)>,
    /// Names of parameters that are another one, with the name of that.
    pub aliases: Vec<(String, String)>,
    /// Names of buffers.
    pub buffers: HashSet<String>,
}

/// A shape and its number of elements.
fn sized(file: &File<'_>, name: &str, value: Value<'_>) -> Result<(Vec<i64>, u64)> {
    let found = shape(value).and_then(|s| elements(&s).map(|n| (s, n as u64)));
    found.ok_or_else(|| file.bad(format!("the shape of parameter {name}"), value.kind()))
}

/// Reads the names. `shard` says how much padding lies between parameters.
pub fn read_model(file: &File<'_>, root: Value<'_>, shard: &Shard) -> Result<Model> {
    let mut model = Model { params: params(file, root, shard)?, ..Model::default() };
    for name in file.items(file.need(root, "buffer_names")?, "of buffers")? {
        let text = name.as_str().ok_or_else(|| file.bad("names of buffers", name.kind()))?;
        model.buffers.insert(text.into());
    }
    if let Some(frozen) = get(root, "frozen_param_shapes") {
        for (name, value) in file.names(frozen, "of frozen parameters")? {
            model.frozen.push((name.into(), sized(file, name, value)?.0));
        }
    }
    if let Some(shared) = get(root, "shared_params") {
        for (name, of) in file.names(shared, "of shared parameters")? {
            let of = of.as_str().ok_or_else(|| file.bad("the name of a parameter", of.kind()))?;
            model.aliases.push((name.into(), of.into()));
        }
    }
    Ok(model)
}

fn params(file: &File<'_>, root: Value<'_>, shard: &Shard) -> Result<Vec<Param>> {
    let shapes = file.need(root, "param_shapes")?;
    // Early versions had one dict for the only group.
    let groups = match entries(shapes) {
        Some(_) => vec![shapes],
        None => file.items(shapes, "of groups of parameters")?,
    };
    if groups.len() != shard.masters.len() && shard.stage < 3 {
        let expected = format!("{} groups of parameters", shard.masters.len());
        return Err(file.bad(expected, groups.len()));
    }
    let (mut params, mut seen) = (Vec::new(), HashSet::new());
    let mut first = 0_u64;
    for (vector, group) in groups.into_iter().enumerate() {
        let names = file.names(group, "of parameters")?;
        let paddings = shard.paddings.get(vector);
        if paddings.is_some_and(|p| p.len() != names.len()) {
            return Err(file.bad("a padding per parameter", "another number"));
        }
        if shard.stage < 3 {
            first = 0;
        }
        for (i, (name, value)) in names.into_iter().enumerate() {
            let (shape, count) = sized(file, name, value)?;
            if !seen.insert(name) {
                return Err(file.bad("each parameter once", name));
            }
            params.push(Param { name: name.into(), shape, count, vector, first });
            let padding = paddings.and_then(|p| p.get(i)).copied().unwrap_or(0);
            let own = if shard.stage < 3 { count } else { share(count, shard.world) };
            let next = first.checked_add(own).and_then(|n| n.checked_add(padding));
            first = next.ok_or_else(|| file.bad("sizes that fit", count))?;
        }
    }
    Ok(params)
}

/// Checks that the ranks' vectors have the elements of all parameters, and no more than padding.
pub fn check_sizes(model: &Model, shards: &[Shard], names: &[String]) -> Result<()> {
    let Some(head) = shards.first() else { return Ok(()) };
    for (shard, name) in shards.iter().zip(names) {
        let bad = |expected: String, found: String| {
            let advice = "the files are of different saves: use an older checkpoint";
            Err(Error::corrupt(name, 0, expected, found, advice))
        };
        if (shard.stage, shard.world) != (head.stage, head.world) {
            let expected =
                format!("stage {} over {} ranks, as in {}", head.stage, head.world, names[0]);
            return bad(expected, format!("stage {} over {} ranks", shard.stage, shard.world));
        }
        if shard.masters.len() != head.masters.len() {
            let expected = format!("{} vectors, as in {}", head.masters.len(), names[0]);
            return bad(expected, shard.masters.len().to_string());
        }
        let lens = |shard: &Shard| shard.masters.iter().map(|v| v.len).collect::<Vec<_>>();
        if head.stage == 3 && lens(shard) != lens(head) {
            return bad(
                format!("vectors of {:?} elements", lens(head)),
                format!("{:?}", lens(shard)),
            );
        }
        if shard.masters.iter().zip(&head.masters).any(|(a, b)| a.dtype != b.dtype) {
            return bad(format!("the types of {}", names[0]), "others".into());
        }
    }
    if head.stage == 3 {
        check_shares(model, head, &names[0])
    } else {
        check_rows(model, shards, &names[0])
    }
}

/// Stage 3: each rank has exactly its share of each parameter.
fn check_shares(model: &Model, head: &Shard, name: &str) -> Result<()> {
    let wanted = model.params.last().map_or(0, |p| p.first + share(p.count, head.world));
    let found: u64 = head.masters.iter().map(|v| v.len).sum();
    if wanted == found {
        return Ok(());
    }
    let advice = "weights that were swapped to a disk are not in the folder; else the file is \
                  of another save";
    Err(Error::corrupt(
        name,
        0,
        format!("{wanted} elements of {} parameters", model.params.len()),
        found,
        advice,
    ))
}

/// Stages 1 and 2: what the ranks have of each vector is the parameters, padded to a multiple of
/// twice the number of ranks.
fn check_rows(model: &Model, shards: &[Shard], name: &str) -> Result<()> {
    let mut wanted: HashMap<usize, u64> = HashMap::new();
    for param in &model.params {
        wanted.insert(param.vector, param.first + param.count);
    }
    let align = shards[0].world.saturating_mul(2).max(1);
    for vector in 0..shards[0].masters.len() {
        let wanted = wanted.get(&vector).copied().unwrap_or(0);
        let found: u64 = shards.iter().map(|s| s.masters[vector].len).sum();
        if found < wanted || found.div_ceil(align) != wanted.div_ceil(align) {
            let expected = format!("{wanted} elements of vector {vector} from all ranks");
            let advice = "the files are of different saves: use an older checkpoint";
            return Err(Error::corrupt(name, 0, expected, found, advice));
        }
    }
    Ok(())
}
