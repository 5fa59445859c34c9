//! A file of `torch.save`: the state as a pickle of plain values and tensors, each tensor's
//! elements in a record of their own. `torch.load(weights_only=True)` reads it.

use std::collections::BTreeMap;

use drivetrain_formats as formats;
use formats::torch::{PickleWriter, TensorPickles, ZipWriter, tensor_pickle};
use serde_json::Value;

use super::ordered::{Files, Ordered};
use super::out::{Out, crc32};
use super::tensors::{Found, Named, named};
use super::{Converted, Progress, Source};
use crate::checkpoint::exchange::import::file_in_store;
use crate::error::{Error, Result};
use crate::storage::StorageOptions;

/// Folder of the records.
const FOLDER: &str = "archive";

/// Writes the state to one file.
pub async fn write(
    source: &Source,
    target: &str,
    storage: &StorageOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    let (store, name) = file_in_store(target, storage)?;
    let all = named(source)?;
    let mut keys = Keys::default();
    for tensor in all.iter().filter(|t| !t.is_alias) {
        keys.by_path.insert(tensor.path.clone(), keys.by_path.len().to_string());
    }
    keys.dtypes =
        all.iter().map(|t| Ok((t.keys.clone(), t.torch_dtype()?))).collect::<Result<_>>()?;
    keys.paths = all.iter().map(|t| (t.keys.clone(), t.path.clone())).collect();
    let mut pickle = PickleWriter::default();
    let written = pickle.value(&source.state, &mut Vec::new(), &mut keys);
    written.map_err(|e| Error::Format { file: name.clone(), source: Box::new(e) })?;
    let found = all.iter().filter(|t| !t.is_alias).map(|t| Ok((t, t.find(source)?)));
    let found: Vec<(&Named, Found<'_>)> = found.collect::<Result<_>>()?;
    let bytes = found.iter().map(|(_, f)| f.bytes).sum();
    progress(Progress::Total(bytes));
    let mut out = Out::create(&store, &name).await?;
    let done = records(&mut out, pickle.finish(), &found, &keys, source, progress).await;
    if let Err(error) = done {
        out.abort().await;
        return Err(error);
    }
    out.finish().await?;
    store.sync_dir("").await?;
    Ok(Converted { tensors: found.len(), bytes, ..Converted::default() })
}

async fn records(
    out: &mut Out,
    pickle: Vec<u8>,
    found: &[(&Named, Found<'_>)],
    keys: &Keys,
    source: &Source,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let mut zip = ZipWriter::default();
    record(out, &mut zip, &format!("{FOLDER}/data.pkl"), pickle).await?;
    record(out, &mut zip, &format!("{FOLDER}/byteorder"), b"little".to_vec()).await?;
    let mut files = Files::new(source);
    for (tensor, found) in found {
        let key = keys.by_path.get(&tensor.path).map_or("", String::as_str);
        let mut ordered = Ordered::new(&mut files, found.path, found.chunks).await?;
        let name = format!("{FOLDER}/data/{key}");
        tensor_record(out, &mut zip, &name, (&mut ordered, found.bytes), progress).await?;
    }
    record(out, &mut zip, &format!("{FOLDER}/version"), b"3\n".to_vec()).await?;
    out.bytes(zip.finish()).await
}

/// Appends a record of bytes.
pub async fn record(out: &mut Out, zip: &mut ZipWriter, name: &str, data: Vec<u8>) -> Result<()> {
    let crc = crc32(&data);
    out.bytes(zip.begin(name, data.len() as u64)).await?;
    out.bytes(data).await?;
    out.bytes(zip.end(crc)).await
}

/// Appends a record with a tensor's elements.
pub async fn tensor_record(
    out: &mut Out,
    zip: &mut ZipWriter,
    name: &str,
    tensor: (&mut Ordered<'_>, u64),
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    out.bytes(zip.begin(name, tensor.1)).await?;
    let crc = out.tensor(tensor.0, tensor.1, progress).await?;
    out.bytes(zip.end(crc)).await
}

/// Names of the records of tensors.
#[derive(Default)]
struct Keys {
    by_path: BTreeMap<String, String>,
    /// By the keys on the way to a tensor.
    dtypes: std::collections::HashMap<Vec<Value>, &'static str>,
    paths: std::collections::HashMap<Vec<Value>, String>,
}

impl TensorPickles for Keys {
    fn tensor(
        &mut self,
        out: &mut PickleWriter,
        path: &[Value],
        node: &Value,
    ) -> formats::Result<()> {
        let known = self.dtypes.get(path).zip(self.paths.get(path));
        let key = known.and_then(|(dtype, at)| Some((*dtype, self.by_path.get(at)?)));
        let Some((dtype, key)) = key else {
            let what = "a tensor tied to one that is not exported".into();
            return Err(formats::Error::Unsupported { what });
        };
        let sizes = node.get("shape").and_then(Value::as_array);
        let shape: Vec<i64> = sizes.into_iter().flatten().filter_map(Value::as_i64).collect();
        tensor_pickle(out, dtype, &shape, key, false)
    }
}
