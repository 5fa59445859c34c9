//! The files of a checkpoint folder: which there are, by rank, and what kinds of folders are not
//! read.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::exchange::import::bytes::Part;
use crate::checkpoint::layout::{check_relative, join};
use crate::error::{Error, Result};
use crate::storage::{OpenOptions, ReadAt, StorageOptions, Store, open_store};

/// File that names the newest checkpoint.
const LATEST: &str = "latest";
/// The same for universal checkpoints.
const LATEST_UNIVERSAL: &str = "latest_universal";
/// Longest name of a checkpoint.
const TAG_BYTES_MAX: u64 = 4096;
const OPTIMIZER_END: &str = "_optim_states.pt";
const MODEL_END: &str = "_model_states.pt";
const AGAIN: &str = "copy the folder again, or use an older checkpoint";

/// Whether a name in a folder says that DeepSpeed wrote it.
pub fn is_mark(name: &str) -> bool {
    [LATEST, LATEST_UNIVERSAL].contains(&name)
        || name.ends_with(OPTIMIZER_END)
        || name.ends_with(MODEL_END)
}

/// A folder of one checkpoint.
#[derive(Debug)]
pub struct Files {
    store: Arc<dyn Store>,
    /// Files with optimizer state, by rank.
    pub optimizer: Vec<String>,
    /// Files with the model's own state, by rank (stage 3).
    by_rank: Vec<String>,
    /// The one with all ranks' state (stages 1 and 2).
    shared: Option<String>,
}

/// What a file's name says.
struct Name {
    optimizer: bool,
    /// Data-parallel rank; one file for all ranks has none.
    rank: Option<usize>,
    model_rank: usize,
}

/// `[bf16_|fp16_][zero_pp_rank_N_]mp_rank_MM_{optim,model}_states.pt`.
fn parse(name: &str) -> Option<Name> {
    let optimizer = name.strip_suffix(OPTIMIZER_END);
    let stem = optimizer.or_else(|| name.strip_suffix(MODEL_END))?;
    let stem = stem.strip_prefix("bf16_").or_else(|| stem.strip_prefix("fp16_")).unwrap_or(stem);
    let (rank, stem) = match stem.strip_prefix("zero_pp_rank_") {
        Some(rest) => {
            let (rank, rest) = rest.split_once('_')?;
            (Some(rank.parse().ok()?), rest)
        }
        None => (None, stem),
    };
    let model_rank = stem.strip_prefix("mp_rank_")?.parse().ok()?;
    Some(Name { optimizer: optimizer.is_some(), rank, model_rank })
}

/// Opens the folder `uri`: that of a checkpoint, or the one with `latest`.
pub async fn open(uri: &str, options: &StorageOptions) -> Result<Files> {
    let store = open_store(uri, options)?;
    let names = store.list_names("").await?;
    let has = |name: &str| names.iter().any(|n| n == name);
    if names.iter().any(|n| parse(n).is_some()) {
        return files(store, uri, &names);
    }
    if has(LATEST) {
        let file = store.open(LATEST, OpenOptions::default()).await?;
        let part = Part::whole(file.as_ref());
        let tag = part.read(0, part.bytes.min(TAG_BYTES_MAX)).await?;
        let tag = String::from_utf8_lossy(&tag).trim().to_string();
        check_relative(&tag, part.name())?;
        let inside = join(uri, &tag);
        let store = open_store(&inside, options)?;
        let names = store.list_names("").await?;
        return files(store, &inside, &names);
    }
    if has(LATEST_UNIVERSAL) {
        return Err(universal(uri));
    }
    files(store, uri, &names)
}

fn universal(uri: &str) -> Error {
    Error::Unsupported {
        what: format!("the universal checkpoint {uri}"),
        advice: "import the ZeRO checkpoint that it was made from".into(),
    }
}

fn files(store: Arc<dyn Store>, uri: &str, names: &[String]) -> Result<Files> {
    refuse_others(uri, names)?;
    let (mut optimizer, mut model) = (BTreeMap::new(), BTreeMap::new());
    let mut shared = None;
    for name in names {
        let Some(parsed) = parse(name) else { continue };
        let other = match (parsed.optimizer, parsed.rank) {
            (true, Some(rank)) => optimizer.insert(rank, name.clone()),
            (false, Some(rank)) => model.insert(rank, name.clone()),
            (false, None) => shared.replace(name.clone()),
            (true, None) => None,
        };
        if let Some(other) = other {
            let found = format!("{other}, too");
            let advice = "remove the files of the other save";
            return Err(Error::corrupt(name, 0, "one file of a rank", found, advice));
        }
    }
    if optimizer.is_empty() {
        return Err(Error::NotFound {
            what: format!("DeepSpeed's files *{OPTIMIZER_END} in {uri}"),
            advice: "name the folder with the file `latest` or that of a checkpoint; without \
                     ZeRO the model's file alone is read with --from pt"
                .into(),
        });
    }
    let optimizer = in_a_row(optimizer)?;
    Ok(Files { store, optimizer, by_rank: in_a_row(model)?, shared })
}

/// Kinds of checkpoints whose parameters are cut in other ways, too.
fn refuse_others(uri: &str, names: &[String]) -> Result<()> {
    let load = "load it in DeepSpeed and save it through a Checkpointer";
    let model_rank = names.iter().find(|n| parse(n).is_some_and(|p| p.model_rank > 0));
    if let Some(name) = model_rank {
        let what = format!("a checkpoint of model-parallel ranks ({name})");
        return Err(Error::Unsupported { what, advice: load.into() });
    }
    let pattern = |kind: &str, is: &dyn Fn(&str) -> bool| match names.iter().find(|n| is(n)) {
        Some(name) => {
            let what = format!("a checkpoint of a model with {kind} ({name})");
            Err(Error::Unsupported { what, advice: load.into() })
        }
        None => Ok(()),
    };
    pattern("experts", &|n| n.starts_with("expp_rank_") || n.contains("_expert_"))?;
    pattern("pipeline stages", &|n| n.starts_with("layer_") && n.contains("model_"))?;
    if names.iter().any(|n| n == "zero/") {
        return Err(universal(uri));
    }
    Ok(())
}

/// The files by rank, none missing between the first and the last.
fn in_a_row(by_rank: BTreeMap<usize, String>) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::with_capacity(by_rank.len());
    for (rank, name) in by_rank {
        if rank != names.len() {
            return Err(missing(&name, rank, names.len()));
        }
        names.push(name);
    }
    Ok(names)
}

fn missing(other: &str, of: usize, rank: usize) -> Error {
    let name = other.replacen(&format!("_rank_{of}_"), &format!("_rank_{rank}_"), 1);
    Error::NotFound { what: format!("the file {name} of rank {rank}"), advice: AGAIN.into() }
}

impl Files {
    /// Checks that there are as many ranks as the state says.
    pub fn check_world(&self, world: u64) -> Result<()> {
        let found = self.optimizer.len() as u64;
        if found < world {
            return Err(missing(&self.optimizer[0], 0, self.optimizer.len()));
        }
        if found > world {
            let expected = format!("files of {world} ranks, as it says");
            let advice = "remove the files of the other save";
            let found = format!("files of {found}");
            return Err(Error::corrupt(&self.optimizer[0], 0, expected, found, advice));
        }
        Ok(())
    }

    /// The files with the model's own state: one for all ranks, or one per rank in stage 3.
    pub fn model(&self, stage: i64) -> Result<Vec<String>> {
        if stage < 3 {
            let what = format!("the file mp_rank_00{MODEL_END}");
            let absent = || Error::NotFound { what, advice: AGAIN.into() };
            return Ok(vec![self.shared.clone().ok_or_else(absent)?]);
        }
        let have = self.by_rank.len();
        if have < self.optimizer.len() {
            let like = format!("zero_pp_rank_0_mp_rank_00{MODEL_END}");
            return Err(missing(&like, 0, have));
        }
        Ok(self.by_rank[..self.optimizer.len()].to_vec())
    }

    /// Opens a file.
    pub async fn open(&self, name: &str) -> Result<Arc<dyn ReadAt>> {
        self.store.open(name, OpenOptions::default()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_they_are() {
        let of = |name: &str| parse(name).map(|n| (n.optimizer, n.rank, n.model_rank));
        assert_eq!(of("zero_pp_rank_12_mp_rank_00_optim_states.pt"), Some((true, Some(12), 0)));
        assert_eq!(of("bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt"), Some((true, Some(0), 3)));
        assert_eq!(of("zero_pp_rank_1_mp_rank_00_model_states.pt"), Some((false, Some(1), 0)));
        assert_eq!(of("mp_rank_00_model_states.pt"), Some((false, None, 0)));
        for other in ["latest", "layer_01-model_00-model_states.pt", "x_optim_states.pt"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert!(
            missing("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 0, 2)
                .to_string()
                .contains("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
        );
    }
}
