//! Folders of DeepSpeed ZeRO, stages 1 to 3: every rank's file has flat vectors of fp32 weights and
//! of optimizer state; the model's file says which parameters they are. Each parameter becomes a
//! tensor whose chunks are the parts of it that the ranks have, so nothing is gathered.
//!
//! | file | what it does |
//! |---|---|
//! | `folder` | which files there are, by rank; what is not read |
//! | `file` | one file: its values |
//! | `shard` | a rank's vectors, and what all ranks have alike |
//! | `model` | names, shapes and places of parameters; whether sizes add up |
//! | `cuts` | which elements of a parameter lie where |
//! | `build`, `weights` | the tree of values and its pieces |

mod build;
mod cuts;
mod file;
mod folder;
mod model;
mod shard;
mod weights;

use drivetrain_formats::torch::Key;
use serde_json::{Map, Value as Json, json};

use super::{Found, state};
use crate::error::Result;
use crate::storage::StorageOptions;
use build::{Ranks, inside};
use file::File;
use folder::Files;
use model::{check_sizes, read_model};
use shard::{Common, keep, read_common, read_shard};
use weights::Weights;

pub use folder::is_mark;

/// Keys of the model's file that say how to read it.
const STRUCTURE: [&str; 7] = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
];
/// Keys that DeepSpeed itself keeps; all others are the trainer's.
const OWN: [&str; 14] = [
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
    "universal_checkpoint_info",
];

/// Reads what a folder holds.
pub async fn find(uri: &str, options: &StorageOptions, under: Option<&str>) -> Result<Found> {
    let files = folder::open(uri, options).await?;
    let at: Vec<Key> = under.map(|key| Key::Text(key.into())).into_iter().collect();
    let mut found = Found::default();
    let (ranks, mut common) = read_ranks(&files, &mut found, &at).await?;
    let mut tree = read_names(&files, &mut found, &at, &ranks, &mut common).await?;
    found.sort_by_place();
    found.left_out = common.left_out.len();
    let notes = common.notes;
    found.step = notes.get("global_steps").and_then(Json::as_i64);
    let mut own = json!({"zero_stage": ranks.shards[0].stage, "world_size": ranks.shards[0].world});
    if let Some(map) = own.as_object_mut() {
        map.extend(notes);
        if !common.left_out.is_empty() {
            map.insert("left_out".into(), Json::Object(common.left_out));
        }
    }
    tree.insert("deepspeed".into(), own);
    found.state_json = match at.first() {
        Some(key) => json!({state::object_key(key): tree}).to_string(),
        None => Json::Object(tree).to_string(),
    };
    Ok(found)
}

async fn read_ranks(files: &Files, found: &mut Found, at: &[Key]) -> Result<(Ranks, Common)> {
    let mut ranks = Ranks { shards: Vec::new(), names: files.optimizer.clone() };
    let mut common = Common::default();
    for name in &files.optimizer {
        let (mut file, pickle) = File::open(files, name, found).await?;
        let first = ranks.shards.is_empty();
        let shard = read_shard(&file, pickle.root(), first).await?;
        if first {
            files.check_world(shard.world)?;
            common = read_common(&mut file, pickle.root(), at)?;
            for key in &shard.left_out {
                let name = state::object_key(&Key::Text(format!("optimizer.state.*.{key}")));
                common.left_out.insert(name, "a value that has no form here".into());
            }
        }
        ranks.shards.push(shard);
    }
    Ok((ranks, common))
}

/// Reads the model's files and makes the tree of all that was found.
async fn read_names(
    files: &Files,
    found: &mut Found,
    at: &[Key],
    ranks: &Ranks,
    common: &mut Common,
) -> Result<Map<String, Json>> {
    let stage = ranks.shards[0].stage;
    let names = files.model(stage)?;
    let parts = weights::read_parts(files, &names, found).await?;
    let (mut file, pickle) = File::open(files, &names[0], found).await?;
    let root = pickle.root();
    let model = read_model(&file, root, &ranks.shards[0])?;
    check_sizes(&model, &ranks.shards, &ranks.names)?;
    let mut tree = Map::new();
    tree.insert("model".into(), Json::Null);
    tree.insert("optimizer".into(), Json::Null);
    let mut client = Map::new();
    for (key, value) in file.names(root, "of a ZeRO checkpoint")? {
        let left_out = &mut common.left_out;
        if key == "ds_autoep_layers" && !value.is_none() {
            return Err(file.bad("a model without experts", key));
        } else if STRUCTURE.contains(&key) || value.is_none() {
        } else if key == "lr_scheduler" {
            keep(&mut file, (key, value), at, &mut tree, left_out)?;
        } else if OWN.contains(&key) {
            let at = inside(at, &["deepspeed"]);
            keep(&mut file, (key, value), &at, &mut common.notes, left_out)?;
        } else {
            keep(&mut file, (key, value), &inside(at, &["client_state"]), &mut client, left_out)?;
        }
    }
    if !client.is_empty() {
        tree.insert("client_state".into(), Json::Object(client));
    }
    let left_out = &mut common.left_out;
    let mut weights = Weights { at, ranks, model: &model, parts, tree: Map::new(), left_out };
    weights.read(&mut file, root)?;
    tree.insert("model".into(), Json::Object(weights.tree));
    tree.insert("optimizer".into(), ranks.optimizer(found, at, &model, common)?);
    Ok(tree)
}
