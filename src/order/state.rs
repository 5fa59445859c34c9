//! Where a loader stands, in a few integers that are the same on every rank.

use serde::{Deserialize, Serialize};

use super::shuffle::{Order, Shuffle};
use crate::error::{Error, Result};

/// Version of the state's meaning; a reader refuses others by name.
pub const STATE_VERSION: u32 = 1;

/// Position of a loader. Independent of ranks, batch size and threads, so it can be restored into
/// another world size or batch size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// [`STATE_VERSION`] of the writer.
    pub version: u32,
    /// Epoch of the next sample.
    pub epoch: u64,
    /// Samples of that epoch already handed out, over all ranks.
    pub position: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Kind of shuffle.
    pub shuffle: Shuffle,
    /// Fingerprint of the dataset's index.
    pub fingerprint: String,
}

impl LoaderState {
    /// The state of `order` over a dataset with this fingerprint.
    pub fn new(order: &Order, fingerprint: &str, epoch: u64, position: u64) -> Self {
        Self {
            version: STATE_VERSION,
            epoch,
            position,
            seed: order.seed(),
            shuffle: order.shuffle(),
            fingerprint: fingerprint.to_string(),
        }
    }

    /// Compact JSON, the same text for equal states.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::invalid("loader state", "JSON", e))
    }

    /// Reads what [`Self::to_json`] wrote. Errors name what is missing or mistyped.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .map_err(|e| Error::invalid("loader state", "the dict that state_dict() returned", e))
    }

    /// Refuses, by the field's name, a state that belongs to another order or dataset.
    pub fn check(&self, order: &Order, fingerprint: &str) -> Result<()> {
        if self.version != STATE_VERSION {
            let expected = format!("{STATE_VERSION} (written by this version)");
            return Err(Error::invalid("loader state: version", expected, self.version));
        }
        if self.seed != order.seed() {
            return Err(differs("seed", order.seed(), self.seed));
        }
        if self.shuffle != order.shuffle() {
            let text = |s: Shuffle| serde_json::to_string(&s).unwrap_or_default();
            return Err(differs("shuffle", text(order.shuffle()), text(self.shuffle)));
        }
        if self.fingerprint != fingerprint {
            return Err(differs("fingerprint", fingerprint, &self.fingerprint));
        }
        if self.position > order.samples() {
            let expected = format!("at most {} (samples of the dataset)", order.samples());
            return Err(Error::invalid("loader state: position", expected, self.position));
        }
        Ok(())
    }
}

fn differs(field: &str, ours: impl std::fmt::Display, theirs: impl std::fmt::Display) -> Error {
    Error::invalid(
        format!("loader state: {field}"),
        format!("{ours} (this loader's)"),
        format!("{theirs} (the state's)"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> Order {
        Order::new(100, 7, Shuffle::Full).unwrap()
    }

    #[test]
    fn json_is_a_fixed_point_and_readable() {
        let state = LoaderState::new(&order(), "f1", 2, 40);
        let text = state.to_json().unwrap();
        assert_eq!(
            text,
            r#"{"version":1,"epoch":2,"position":40,"seed":7,"shuffle":"full","fingerprint":"f1"}"#
        );
        let back = LoaderState::from_json(&text).unwrap();
        assert_eq!(back, state);
        assert_eq!(back.to_json().unwrap(), text);
    }

    #[test]
    fn big_seeds_survive_json() {
        let order = Order::new(1, u64::MAX, Shuffle::BLOCK_DEFAULT).unwrap();
        let state = LoaderState::new(&order, "", u64::MAX, 1);
        assert_eq!(LoaderState::from_json(&state.to_json().unwrap()).unwrap(), state);
    }

    #[test]
    fn each_difference_is_refused_by_name() {
        let good = LoaderState::new(&order(), "f1", 0, 0);
        assert!(good.check(&order(), "f1").is_ok());
        let cases: [(&str, LoaderState); 5] = [
            ("version", LoaderState { version: 2, ..good.clone() }),
            ("seed", LoaderState { seed: 8, ..good.clone() }),
            ("shuffle", LoaderState { shuffle: Shuffle::Sequential, ..good.clone() }),
            ("fingerprint", LoaderState { fingerprint: "f2".into(), ..good.clone() }),
            ("position", LoaderState { position: 101, ..good }),
        ];
        for (field, state) in cases {
            let refused = state.check(&order(), "f1").unwrap_err().to_string();
            assert!(refused.starts_with(&format!("loader state: {field}")), "{refused}");
        }
    }

    #[test]
    fn broken_json_names_the_missing_field() {
        let refused = LoaderState::from_json(r#"{"version":1}"#).unwrap_err().to_string();
        assert!(refused.contains("missing field `epoch`"), "{refused}");
    }
}
