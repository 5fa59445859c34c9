//! Checkpoints that come from or go to other programs: one folder with a manifest directly inside,
//! written rank by rank without a meeting of our own, importers and exporters.
//!
//! | file | what it does |
//! |---|---|
//! | `folder` | writes rank files, then the table, then the manifest: the commit |
//! | `export/` | safetensors, torch.save files, DCP folders |
//! | `import/` | torch.save files, DCP folders, safetensors |
//! | `plain` | values of small `torch.save` archives |
//! | `stream` | a planned file as a stream of windows, with checksums on the way |

mod export;
mod folder;
mod import;
mod plain;
mod stream;

pub use export::{ExportOptions, SHARD_BYTES, TargetKind, export};
pub use folder::{Folder, Publication, Written, fresh_attempt, step_of_folder};
pub use import::{Converted, ImportOptions, Progress, SourceKind, detect, import};
pub use plain::plain_torch_value;
pub use stream::Feed;
