//! What planning and committing cost at sizes nobody has at hand: the production planner, messages,
//! judge, table and manifest on a synthetic model over thousands of ranks. No tensor is touched.

use std::time::Instant;

use super::judge::judge;
use super::messages::{Part, decode_part, encode_part};
use super::write::{Written, pretend_written};
use super::{Folders, Job};
use crate::checkpoint::layout::RollLimits;
use crate::checkpoint::layout::{
    Chunk, FileRecord, Manifest, TENSORS, crc32c, decode_table, encode_table, join, plan_files,
};
use crate::checkpoint::plan::{TensorIn, plan};
use crate::checkpoint::read::by_tensor;
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};

/// A transformer with Adam state on a mesh of pipeline × tensor × fully-sharded ranks.
#[derive(Debug, Clone, Copy)]
pub struct Synthetic {
    /// Layers of all stages together, a multiple of `pipeline`.
    pub layers: u32,
    /// Width, in elements; a multiple of `tensor * sharded` for even shards.
    pub hidden: i64,
    /// Pipeline stages.
    pub pipeline: u32,
    /// Tensor-parallel ranks.
    pub tensor: u32,
    /// Ranks that share one tensor-parallel shard by rows.
    pub sharded: u32,
    /// Copies of everything above (HSDP); each tensor is then written once.
    pub replicas: u32,
}

/// What one stage took.
#[derive(Debug, Clone)]
pub struct Cost {
    /// What was done.
    pub stage: &'static str,
    /// How long, in seconds.
    pub seconds: f64,
    /// Bytes it made or read; 0 where it makes none.
    pub bytes: u64,
}

/// What a simulated save did.
#[derive(Debug, Clone)]
pub struct Report {
    /// Parameters of the model.
    pub parameters: u64,
    /// Ranks.
    pub ranks: u32,
    /// Rows of the table.
    pub chunks: u64,
    /// Bytes of the tensors, each counted once.
    pub data_bytes: u64,
    /// Each stage, in order.
    pub costs: Vec<Cost>,
}

/// How a matrix is cut over the tensor-parallel ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    Rows,
    Columns,
    Copied,
}

/// Name, rows and columns in widths (0 columns: a vector), cut.
const LAYER: [(&str, i64, i64, Cut); 12] = [
    ("attention.qkv.weight", 3, 1, Cut::Rows),
    ("attention.qkv.bias", 3, 0, Cut::Rows),
    ("attention.out.weight", 1, 1, Cut::Columns),
    ("attention.out.bias", 1, 0, Cut::Copied),
    ("mlp.up.weight", 4, 1, Cut::Rows),
    ("mlp.up.bias", 4, 0, Cut::Rows),
    ("mlp.down.weight", 1, 4, Cut::Columns),
    ("mlp.down.bias", 1, 0, Cut::Copied),
    ("norm_1.weight", 1, 0, Cut::Copied),
    ("norm_1.bias", 1, 0, Cut::Copied),
    ("norm_2.weight", 1, 0, Cut::Copied),
    ("norm_2.bias", 1, 0, Cut::Copied),
];

/// What is kept of each tensor: parameters, master copy and Adam's moments.
const KEPT: [(&str, &str, i64); 4] =
    [("model", "BF16", 2), ("master", "F32", 4), ("exp_avg", "F32", 4), ("exp_avg_sq", "F32", 4)];

impl Synthetic {
    /// All ranks.
    pub fn ranks(&self) -> u32 {
        self.pipeline * self.tensor * self.sharded * self.replicas
    }

    /// Parameters.
    pub fn parameters(&self) -> u64 {
        let h = self.hidden as u64;
        let layer = |(_, rows, columns, _): &(&str, i64, i64, Cut)| match *columns {
            0 => *rows as u64 * h,
            c => *rows as u64 * h * c as u64 * h,
        };
        LAYER.iter().map(layer).sum::<u64>() * u64::from(self.layers)
    }

    /// Bytes of the largest piece that a rank holds.
    fn largest_bytes(&self) -> usize {
        (4 * self.hidden * self.hidden * 4) as usize / (self.tensor * self.sharded) as usize
    }

    /// What `rank` saves; `zeros` stands for all data.
    fn tensors<'a>(&self, rank: u32, zeros: &'a [u8]) -> Vec<TensorIn<'a>> {
        let per_stage = self.tensor * self.sharded * self.replicas;
        let stage = rank / per_stage;
        let layers = self.layers / self.pipeline;
        let mut found = Vec::new();
        for layer in stage * layers..(stage + 1) * layers {
            for part in &LAYER {
                for kept in &KEPT {
                    found.push(self.tensor(rank, layer, *part, *kept, zeros));
                }
            }
        }
        found
    }

    fn tensor<'a>(
        &self,
        rank: u32,
        layer: u32,
        (name, rows, columns, cut): (&str, i64, i64, Cut),
        (kind, dtype, bytes): (&str, &str, i64),
        zeros: &'a [u8],
    ) -> TensorIn<'a> {
        let inner = rank % (self.tensor * self.sharded * self.replicas);
        let (copy, rest) =
            (inner / (self.tensor * self.sharded), inner % (self.tensor * self.sharded));
        let (shard, lane) = (i64::from(rest / self.tensor), i64::from(rest % self.tensor));
        let (sharded, lanes) = (i64::from(self.sharded), i64::from(self.tensor));
        let mut shape = vec![rows * self.hidden];
        if columns > 0 {
            shape.push(columns * self.hidden);
        }
        let mut rect = Rect::whole(&shape);
        let mut cut_at = |dim: usize, at: i64, of: i64| {
            rect.extent[dim] /= of;
            rect.offsets[dim] = at * rect.extent[dim];
        };
        match cut {
            Cut::Rows => cut_at(0, shard * lanes + lane, sharded * lanes),
            Cut::Columns => {
                cut_at(0, shard, sharded);
                cut_at(1, lane, lanes);
            }
            Cut::Copied => cut_at(0, shard, sharded),
        }
        let length = (rect.extent.iter().product::<i64>() * bytes) as usize;
        let copied = if cut == Cut::Copied { self.tensor } else { 1 };
        let base = rank - copy * self.tensor * self.sharded;
        let replicas = (0..self.replicas).flat_map(|c| {
            let first = base + c * self.tensor * self.sharded;
            let lane = lane as u32;
            (0..copied).map(move |l| if copied > 1 { first - lane + l } else { first })
        });
        let mut replicas: Vec<u32> = replicas.collect();
        if replicas.len() == 1 {
            replicas.clear();
        }
        TensorIn {
            path: format!("[\"{kind}\",\"layers\",{layer},\"{name}\"]"),
            dtype: dtype.into(),
            shape,
            rect,
            data: &zeros[..length],
            replicas,
            pin_rank: None,
        }
    }
}

/// Times stages.
#[derive(Default)]
struct Clock {
    costs: Vec<Cost>,
}

impl Clock {
    fn add(&mut self, stage: &'static str, started: Instant, bytes: u64) {
        let seconds = started.elapsed().as_secs_f64();
        match self.costs.iter_mut().find(|c| c.stage == stage) {
            Some(cost) => {
                cost.seconds += seconds;
                cost.bytes += bytes;
            }
            None => self.costs.push(Cost { stage, seconds, bytes }),
        }
    }
}

/// Plans on every rank, sends every part, and publishes on rank 0, all in this thread. Stages named
/// "all ranks" are work that the ranks do side by side.
pub fn simulate(model: &Synthetic) -> Result<Report> {
    let zeros = vec![0; model.largest_bytes()];
    let folders = Folders::new(1, 1, 1)?;
    let mut clock = Clock::default();
    let mut parts = Vec::new();
    for rank in 0..model.ranks() {
        let message = part_of(model, rank, &zeros, &folders, &mut clock)?;
        let started = Instant::now();
        let part = decode_part(rank, &message)?.map_err(super::messages::Failure::into_error)?;
        clock.add("rank 0: parts decoded", started, message.len() as u64);
        parts.push(part);
    }
    let started = Instant::now();
    if let Err(doubt) = judge(&parts) {
        return Err(Error::invalid("simulated save", "parts that fit", format!("{doubt:?}")));
    }
    clock.add("rank 0: parts judged", started, 0);
    let (chunks, data_bytes) = publish(model, parts, &folders, &mut clock)?;
    let (parameters, ranks) = (model.parameters(), model.ranks());
    Ok(Report { parameters, ranks, chunks, data_bytes, costs: clock.costs })
}

fn part_of(
    model: &Synthetic,
    rank: u32,
    zeros: &[u8],
    folders: &Folders,
    clock: &mut Clock,
) -> Result<Vec<u8>> {
    let tensors = model.tensors(rank, zeros);
    let started = Instant::now();
    let planned = plan(rank, model.ranks(), &tensors)?;
    let images = plan_files(rank, &planned.pieces, RollLimits::default())?;
    clock.add("all ranks: planned", started, 0);
    let mut written = Written::default();
    for image in &images {
        let (file, rows) = pretend_written(image, &planned.pieces, folders, rank);
        written.files.push(file);
        written.chunks.extend(rows);
    }
    let job = Job {
        step: 1,
        groups: std::sync::Arc::new(planned.groups.into_iter().collect()),
        state_json: "{}".into(),
        per_rank_json: "{\"rng\":1}".into(),
        ..Job::default()
    };
    let started = Instant::now();
    let files = std::mem::take(&mut written.files);
    let message = encode_part(&Ok(Part::of(rank, &job, files, &mut written)))?;
    clock.add("all ranks: parts encoded", started, message.len() as u64);
    Ok(message)
}

/// Writes and reads back what rank 0 publishes, in memory.
fn publish(
    model: &Synthetic,
    parts: Vec<Part>,
    folders: &Folders,
    clock: &mut Clock,
) -> Result<(u64, u64)> {
    let started = Instant::now();
    let (mut files, mut chunks, mut per_rank) = (Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        files.extend(part.head.files);
        chunks.extend(part.chunks);
        per_rank.push(part.head.per_rank_json);
    }
    let data_bytes = chunks.iter().map(|c| c.length).sum();
    let table = encode_table(&chunks)?;
    let rows = chunks.len() as u64;
    drop(chunks);
    clock.add("rank 0: table encoded", started, table.len() as u64);
    let started = Instant::now();
    let table_crc32c = crc32c(&table);
    files.insert(
        0,
        FileRecord {
            path: join(&folders.attempt, TENSORS),
            size_bytes: table.len() as u64,
            crc32c: format!("{table_crc32c:08x}"),
            header_bytes: 0,
            header_crc32c: "00000000".into(),
            rank: 0,
        },
    );
    let manifest = Manifest {
        step: 1,
        world_size: model.ranks(),
        attempt: folders.attempt.clone(),
        files,
        refers_to: Vec::new(),
        referred: Vec::new(),
        delta: false,
        tool: "drivetrain".into(),
        committed_ns: None,
        root: None,
        metrics: std::collections::BTreeMap::new(),
        state_json: "{}".into(),
        per_rank_json: per_rank,
    };
    let encoded = manifest.encode()?;
    clock.add("rank 0: manifest encoded", started, encoded.len() as u64);
    reopen(&encoded, &table, clock)?;
    Ok((rows, data_bytes))
}

fn reopen(manifest: &[u8], table: &[u8], clock: &mut Clock) -> Result<()> {
    let started = Instant::now();
    let manifest = Manifest::decode(manifest, "manifest.json")?;
    clock.add("reader: manifest opened", started, 0);
    let started = Instant::now();
    let _ = crc32c(table);
    let chunks: Vec<Chunk> = decode_table(table, TENSORS)?;
    clock.add("reader: table decoded", started, table.len() as u64);
    let started = Instant::now();
    let tensors = by_tensor(chunks, &manifest, TENSORS)?;
    clock.add("reader: rows checked and sorted by tensor", started, tensors.len() as u64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_on_a_real_mesh_is_covered_once() {
        let model =
            Synthetic { layers: 4, hidden: 64, pipeline: 2, tensor: 2, sharded: 4, replicas: 2 };
        let report = simulate(&model).unwrap();
        // The kept bytes of a parameter are written once: 2 + 4 + 4 + 4.
        assert_eq!(report.data_bytes, 14 * report.parameters);
        assert_eq!(report.ranks, 32);
        assert_eq!(report.parameters, 4 * (12 * 64 * 64 + 13 * 64));
    }
}
