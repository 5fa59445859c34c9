//! Files of `torch.save` whose object is a dict of names, or any one value.

use drivetrain_formats::pickle::{Pickle, View};
use drivetrain_formats::torch::{Key, key_json};

use super::archive::read_torch;
use super::bytes::Part;
use super::tensors::Tensors;
use super::{Found, file_in_store};
use crate::error::Result;
use crate::storage::{OpenOptions, StorageOptions};

/// Name that a saved object without names gets.
const NAMELESS: &str = "value";

/// Reads what a file holds.
pub async fn find(uri: &str, options: &StorageOptions, under: Option<&str>) -> Result<Found> {
    let (store, name) = file_in_store(uri, options)?;
    let file = store.open(&name, OpenOptions::default()).await?;
    let (pickle, storages) = read_torch(Part::whole(file.as_ref())).await?;
    let under = under.or(if is_named(&pickle) { None } else { Some(NAMELESS) });
    let prefix: Vec<Key> = under.map(|key| Key::Text(key.into())).into_iter().collect();
    let mut found = Found { files: vec![file], ..Found::default() };
    let text = Tensors::of_last_file(&mut found, storages).json(pickle.root(), &prefix)?;
    found.state_json = match under {
        Some(key) => format!("{{{}:{text}}}", key_json(&Key::Text(key.into()))),
        // The names of a state are a plain dict.
        None => match text.strip_prefix("{\"~odict\":").and_then(|t| t.strip_suffix('}')) {
            Some(inner) => inner.to_string(),
            None => text,
        },
    };
    Ok(found)
}

/// Whether the saved object is a dict whose keys are names.
fn is_named(pickle: &Pickle) -> bool {
    let pairs = match pickle.root().view() {
        View::Dict(pairs) => pairs,
        View::Object(object) if object.name == ("collections", "OrderedDict") => object.pairs,
        _ => return false,
    };
    pairs.iter().all(|(key, _)| key.as_str().is_some_and(|key| !key.starts_with('~')))
}
