//! A recording's streams: what one sensor or signal delivered, item by item, on one clock.
//!
//! Every format's own join (nuScenes key frames) and every join by time goes through these types,
//! so a rule means the same wherever the items come from.

use super::types::FieldKind;
use crate::error::{Error, Result};

/// Which instant of an item its time stamp says. Sensors differ: nuScenes stamps a LiDAR sweep at
/// its end, Argoverse 2 at its start, cameras when they fire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stamp {
    /// When it began.
    Start,
    /// When it was complete.
    End,
    /// Halfway.
    Middle,
    /// When the sensor was triggered.
    Trigger,
}

impl Stamp {
    /// Name in a field's `extra` under `stamp`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::End => "end",
            Self::Middle => "middle",
            Self::Trigger => "trigger",
        }
    }
}

/// One item of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamItem {
    /// Recording it belongs to; items of different recordings never join.
    pub recording: u32,
    /// Its time.
    pub timestamp_ns: i64,
    /// Items with the same number follow each other without a break.
    pub chain: u32,
    /// Position in the anchor stream that the format itself assigns it to.
    pub assigned: Option<u32>,
    /// What the builder of the stream means by it (a row of its tables).
    pub payload: u32,
}

/// A named stream of items sorted by recording and time.
#[derive(Debug, Clone)]
pub struct Stream {
    /// Its name.
    pub name: String,
    /// What its items are.
    pub kind: FieldKind,
    /// Which instant their time says.
    pub stamp: Stamp,
    /// Frame of their geometry, where they have one.
    pub frame: Option<String>,
    items: Vec<StreamItem>,
}

impl Stream {
    /// A stream; items out of order are refused, because every join searches by order.
    pub fn new(
        name: impl Into<String>,
        kind: FieldKind,
        stamp: Stamp,
        frame: Option<String>,
        items: Vec<StreamItem>,
    ) -> Result<Self> {
        let name = name.into();
        let order = |item: &StreamItem| (item.recording, item.timestamp_ns);
        if let Some(at) = items.windows(2).position(|pair| order(&pair[0]) > order(&pair[1])) {
            return Err(Error::invalid(
                format!("items of stream {name}"),
                "sorted by recording and time",
                format!("item {} before item {at}", at + 1),
            ));
        }
        if u32::try_from(items.len()).is_err() {
            return Err(Error::invalid(&name, "at most 2^32 items", items.len()));
        }
        Ok(Self { name, kind, stamp, frame, items })
    }

    /// The items, by recording and time.
    pub fn items(&self) -> &[StreamItem] {
        &self.items
    }

    /// Position of the first item of `recording` that is not earlier than `timestamp_ns`.
    pub(super) fn at_or_after(&self, recording: u32, timestamp_ns: i64) -> usize {
        let key = (recording, timestamp_ns);
        self.items.partition_point(|item| (item.recording, item.timestamp_ns) < key)
    }

    /// Position of the first item of `recording` that is later than `timestamp_ns`.
    pub(super) fn after(&self, recording: u32, timestamp_ns: i64) -> usize {
        let key = (recording, timestamp_ns);
        self.items.partition_point(|item| (item.recording, item.timestamp_ns) <= key)
    }

    /// Position of the first item of `recording` or a later one.
    pub(super) fn recording_start(&self, recording: u32) -> usize {
        self.items.partition_point(|item| item.recording < recording)
    }

    /// The item at `at`, if it belongs to `recording`.
    pub(super) fn get(&self, recording: u32, at: usize) -> Option<&StreamItem> {
        self.items.get(at).filter(|item| item.recording == recording)
    }
}
