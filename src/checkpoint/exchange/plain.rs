//! The plain value in a small `torch.save` archive that is in memory already.

use drivetrain_formats::pickle::Pickle;
use drivetrain_formats::torch::{NAMES, NoTensors, typed_json, zip};

use crate::error::{Error, Result};

/// Typed JSON of the value; an error for archives with tensors or objects of other classes.
pub fn plain_torch_value(archive: &[u8]) -> Result<String> {
    let inner =
        |source| Error::Format { file: "torch.save archive".into(), source: Box::new(source) };
    let broken =
        || Error::corrupt("torch.save archive", 0, "a record data.pkl", "none", "save again");
    let tail = archive.len().saturating_sub(zip::TAIL_BYTES_MAX as usize);
    let found = zip::directory(&archive[tail..], archive.len() as u64).map_err(inner)?;
    let range = found.offset as usize..(found.offset + found.bytes) as usize;
    let listed = archive.get(range).ok_or_else(broken)?;
    let records = zip::records(listed, found).map_err(inner)?;
    let record = records.iter().find(|r| r.name.ends_with("/data.pkl")).ok_or_else(broken)?;
    let local = archive.get(record.header as usize..).ok_or_else(broken)?;
    let start = zip::data_start(local, record).map_err(inner)? as usize;
    let bytes = archive.get(start..start.saturating_add(record.bytes as usize));
    let (pickle, _) = Pickle::parse_symbolic(bytes.ok_or_else(broken)?, NAMES).map_err(inner)?;
    typed_json(pickle.root(), &[], &mut NoTensors).map_err(inner)
}
