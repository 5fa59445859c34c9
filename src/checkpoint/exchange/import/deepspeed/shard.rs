//! A rank's file of optimizer state: its parts of the fp32 weights and of everything the optimizer
//! keeps per element, as flat vectors, one per group of parameters.

use std::collections::BTreeSet;

use drivetrain_formats as formats;
use formats::pickle::{Value, View};
use formats::torch::{Key, NoTensors, Stored, typed_json};
use serde_json::{Map, Value as Json};

use super::file::{File, Vector, count, entries, get};
use crate::checkpoint::exchange::import::state::object_key;
use crate::error::{Error, Result};

/// Largest tensor that an optimizer keeps once for all elements of a vector (a step).
const SMALL_ELEMENTS_MAX: u64 = 1;
/// Keys of the file that are read as something else, or say nothing once ranks are merged.
const STRUCTURE: [&str; 11] = [
    "zero_stage",
    "partition_count",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
    "base_optimizer_state",
    "optimizer_state_dict",
    "group_paddings",
    "param_alignment_paddings",
    "param_slice_mappings",
    "universal_checkpoint_info",
    "ds_version",
];

/// What an optimizer keeps for a vector under one key.
pub enum Slot {
    /// A number per element.
    Flat(Vector),
    /// One tensor for all of it.
    Small(Stored, Vec<i64>, Vec<u8>),
    /// A plain value for all of it, as typed JSON.
    Plain(Json),
}

/// What one rank has.
pub struct Shard {
    /// ZeRO stage, 1 to 3.
    pub stage: i64,
    /// Number of ranks that parameters are cut over.
    pub world: u64,
    /// fp32 weights.
    pub masters: Vec<Vector>,
    /// What the optimizer keeps, by vector.
    pub states: Vec<Vec<(String, Slot)>>,
    /// Elements of padding after each parameter of each vector, if there are any.
    pub paddings: Vec<Vec<u64>>,
    /// Keys of the optimizer's state that have no form here.
    pub left_out: BTreeSet<String>,
}

/// A group of parameters of the optimizer.
pub struct Group {
    /// The vectors of its parameters.
    pub vectors: Vec<usize>,
    /// Its settings.
    pub settings: Map<String, Json>,
}

/// What all ranks have alike; read from the first.
#[derive(Default)]
pub struct Common {
    /// The groups; none if the file does not say.
    pub groups: Vec<Group>,
    /// Other values.
    pub notes: Map<String, Json>,
    /// What has no form here, with the reason.
    pub left_out: Map<String, Json>,
}

/// Reads a rank's vectors. Values for whole vectors are read for the first rank only.
pub async fn read_shard(file: &File<'_>, root: Value<'_>, first: bool) -> Result<Shard> {
    let state = file.need(root, "optimizer_state_dict")?;
    let stage = stage(file, state)?;
    let key = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
    let mut masters = Vec::new();
    for value in file.items(file.need(state, key)?, key)? {
        let tensor = file.tensor(value)?.ok_or_else(|| file.bad("a tensor", value.kind()))?;
        masters.push(file.vector(key, &tensor)?);
    }
    let (world, paddings) = (world(file, state)?, paddings(file, state)?);
    let (states, left_out) = (Vec::with_capacity(masters.len()), BTreeSet::new());
    let mut shard = Shard { stage, world, masters, states, paddings, left_out };
    for number in 0..shard.masters.len() {
        let slots = match state_of(base(state, stage), number) {
            Some(value) => slots(file, value, number, first, &mut shard).await?,
            None => Vec::new(),
        };
        shard.states.push(slots);
    }
    Ok(shard)
}

fn stage(file: &File<'_>, state: Value<'_>) -> Result<i64> {
    let Some(value) = get(state, "zero_stage") else {
        // The optimizer for bf16 cuts as stage 1 does and does not say so.
        file.need(state, "single_partition_of_fp32_groups")?;
        return Ok(1);
    };
    let number = match value.view() {
        View::Object(member) => member.arguments.get(0).and_then(Value::as_i64),
        _ => value.as_i64(),
    };
    match number {
        Some(stage @ 1..=3) => Ok(stage),
        other => {
            let shown = other.map_or(value.kind().to_string(), |n| n.to_string());
            let what = format!("ZeRO stage {shown} in {}", file.name());
            Err(Error::Unsupported { what, advice: "stages 1, 2 and 3 are read".into() })
        }
    }
}

fn world(file: &File<'_>, state: Value<'_>) -> Result<u64> {
    let value = file.need(state, "partition_count")?;
    let counts: Option<Vec<u64>> = match value.items() {
        Some(items) => items.map(count).collect(),
        None => count(value).map(|n| vec![n]),
    };
    match counts.as_deref() {
        Some([first, rest @ ..]) if *first > 0 && rest.iter().all(|n| n == first) => Ok(*first),
        Some([_, _, ..]) => Err(Error::Unsupported {
            what: format!("{}: groups over different numbers of ranks", file.name()),
            advice: "load it in DeepSpeed and save it through a Checkpointer".into(),
        }),
        _ => Err(file.bad("a partition_count from 1 up", value.kind())),
    }
}

fn paddings(file: &File<'_>, state: Value<'_>) -> Result<Vec<Vec<u64>>> {
    let Some(value) = get(state, "param_alignment_paddings") else { return Ok(Vec::new()) };
    let what = "param_alignment_paddings";
    let group = |value| {
        let counts: Option<Vec<u64>> = file.items(value, what)?.into_iter().map(count).collect();
        counts.ok_or_else(|| file.bad(format!("numbers from 0 up in {what}"), "others"))
    };
    file.items(value, what)?.into_iter().map(group).collect()
}

/// The state dict of the optimizer that DeepSpeed wraps, or its states alone (elastic).
fn base(state: Value<'_>, stage: i64) -> Option<Value<'_>> {
    get(state, if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" })
}

fn state_of(base: Option<Value<'_>>, number: usize) -> Option<Value<'_>> {
    let base = base?;
    if let Some(mut items) = base.items() {
        return items.nth(number);
    }
    let of = |key: Value<'_>| key.as_i64().and_then(|n| usize::try_from(n).ok());
    let states = entries(get(base, "state")?)?;
    let found = states.iter().find(|(key, _)| of(*key) == Some(number));
    found.map(|(_, value)| value)
}

async fn slots(
    file: &File<'_>,
    value: Value<'_>,
    number: usize,
    first: bool,
    shard: &mut Shard,
) -> Result<Vec<(String, Slot)>> {
    let mut slots = Vec::new();
    let master = shard.masters[number];
    for (key, value) in file.names(value, "of optimizer state")? {
        let Some(tensor) = file.tensor(value)? else {
            match plain(value) {
                Some(value) if first => slots.push((key.to_string(), Slot::Plain(value))),
                Some(_) => {}
                None => drop(shard.left_out.insert(key.to_string())),
            }
            continue;
        };
        let vector = file.vector(key, &tensor)?;
        if !tensor.shape.is_empty() && vector.len >= master.len {
            slots.push((key.to_string(), Slot::Flat(vector)));
        } else if vector.len <= SMALL_ELEMENTS_MAX {
            if first {
                let bytes = file.bytes(&vector).await?;
                slots.push((key.to_string(), Slot::Small(tensor.dtype, tensor.shape, bytes)));
            }
        } else {
            let expected = format!("{} elements of {key:?} as of the fp32 weights", master.len);
            return Err(file.bad(expected, vector.len));
        }
    }
    Ok(slots)
}

fn plain(value: Value<'_>) -> Option<Json> {
    let text = typed_json(value, &[], &mut NoTensors).ok()?;
    serde_json::from_str(&text).ok()
}

/// Reads what all ranks have alike.
pub fn read_common(file: &mut File<'_>, root: Value<'_>, at: &[Key]) -> Result<Common> {
    let state = file.need(root, "optimizer_state_dict")?;
    let mut common = Common::default();
    let stage = stage(file, state)?;
    let groups = base(state, stage).and_then(|base| get(base, "param_groups"));
    for (k, group) in groups.map_or(Ok(vec![]), |g| file.items(g, "of groups"))?.iter().enumerate()
    {
        let mut own = Group { vectors: Vec::new(), settings: Map::new() };
        let mut inside = at.to_vec();
        inside.extend(["optimizer", "param_groups"].map(|key| Key::Text(key.into())));
        inside.push(Key::Number(k as i64));
        for (key, value) in file.names(*group, "of a group")? {
            if key == "params" {
                let numbers: Option<Vec<u64>> =
                    file.items(value, "of parameters")?.into_iter().map(count).collect();
                let numbers = numbers.ok_or_else(|| file.bad("numbers of parameters", "others"))?;
                own.vectors = numbers.into_iter().map(|n| n as usize).collect();
                continue;
            }
            keep(file, (key, value), &inside, &mut own.settings, &mut common.left_out)?;
        }
        common.groups.push(own);
    }
    let mut inside = at.to_vec();
    inside.push(Key::Text("deepspeed".into()));
    for (key, value) in file.names(state, "of the optimizer's file")? {
        if !STRUCTURE.contains(&key) && !value.is_none() {
            keep(file, (key, value), &inside, &mut common.notes, &mut common.left_out)?;
        }
    }
    Ok(common)
}

/// Puts a value into `kept` under its key, or its reason into `left_out` if it has no form here.
pub fn keep(
    file: &mut File<'_>,
    (key, value): (&str, Value<'_>),
    at: &[Key],
    kept: &mut Map<String, Json>,
    left_out: &mut Map<String, Json>,
) -> Result<()> {
    let name = Key::Text(key.into());
    let mut path = at.to_vec();
    path.push(name.clone());
    match file.tensors.json(value, &path) {
        Ok(text) => {
            let json = serde_json::from_str(&text);
            let json = json.map_err(|e| Error::invalid("typed JSON", "JSON", e))?;
            kept.insert(object_key(&name), json);
            Ok(())
        }
        Err(reason) if has_no_form(&reason) => {
            let shown = |key: &Key| match key {
                Key::Text(text) => text.clone(),
                Key::Number(number) => number.to_string(),
            };
            let path: Vec<String> = path.iter().map(shown).collect();
            left_out.insert(object_key(&Key::Text(path.join("."))), reason.to_string().into());
            Ok(())
        }
        Err(damage) => Err(damage),
    }
}

fn has_no_form(error: &Error) -> bool {
    match error {
        Error::Unsupported { .. } => true,
        Error::Format { source, .. } => matches!(**source, formats::Error::Unsupported { .. }),
        _ => false,
    }
}
