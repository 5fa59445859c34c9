//! All ranks hear what each has to say.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::meet::{Room, Tick, missing_error};
use crate::error::{Error, Result};

/// What a rank says.
#[derive(Serialize, Deserialize)]
struct Said {
    tag: String,
    payload: String,
}

/// What rank 0 tells everybody.
#[derive(Serialize, Deserialize)]
enum Heard {
    All(Vec<String>),
    Missing { ranks: Vec<u32>, words: String },
    Tags(BTreeMap<u32, String>),
}

/// Every rank's payload in rank order, the same on all ranks.
pub fn agree(
    room: &Room,
    op: u64,
    tag: &str,
    payload: &str,
    tick: Tick<'_>,
) -> Result<Vec<String>> {
    if room.world_size == 1 {
        return Ok(vec![payload.into()]);
    }
    let doing = room.words.begin(format!("agreeing on {tag}"));
    let heard = hear(room, op, tag, payload, tick);
    doing.end();
    match heard? {
        Heard::All(payloads) => Ok(payloads),
        Heard::Missing { ranks, words } => Err(missing_error(tag, &ranks, room.timeout, &words)),
        Heard::Tags(tags) => {
            let found = tags.iter().map(|(r, t)| format!("rank {r}: {t}"));
            let found = found.collect::<Vec<_>>().join(", ");
            Err(Error::invalid("agreement", "the same call on all ranks", found))
        }
    }
}

/// What rank 0 tells everybody.
fn hear(room: &Room, op: u64, tag: &str, payload: &str, tick: Tick<'_>) -> Result<Heard> {
    let meeting = format!("agree-{op}");
    let own = Said { tag: tag.into(), payload: payload.into() };
    let heard = if room.rank == 0 {
        lead(room, &meeting, op, own, tick)?
    } else {
        room.join(room.verdict_deadline(), tick)?;
        room.put(&meeting, &format!("say-{}", room.rank), &encode(&own)?)?;
        match room.wait(&meeting, "all", room.verdict_deadline(), tick)? {
            Some(message) => decode(&message)?,
            None => return Err(room.missing(&format!("answering ({tag})"), &[0])),
        }
    };
    Ok(heard)
}

fn lead(room: &Room, meeting: &str, op: u64, own: Said, tick: Tick<'_>) -> Result<Heard> {
    let deadline = room.deadline();
    let others: Vec<u32> = (1..room.world_size).collect();
    let joined = room.join(deadline, tick);
    if let Err(e) = &joined
        && !matches!(e, Error::Timeout { .. })
    {
        joined?;
    }
    let found = room.gather(meeting, "say", &others, deadline, tick)?;
    let mut said = BTreeMap::from([(0, own)]);
    for (rank, message) in &found {
        said.insert(*rank, decode::<Said>(message)?);
        room.remove(meeting, &format!("say-{rank}"))?;
    }
    let missing: Vec<u32> = others.iter().copied().filter(|r| !said.contains_key(r)).collect();
    let alike = said.values().all(|s| s.tag == said[&0].tag);
    let heard = if !missing.is_empty() {
        let words = room.words.last(&missing);
        Heard::Missing { ranks: missing, words }
    } else if alike {
        Heard::All(said.into_values().map(|s| s.payload).collect())
    } else {
        Heard::Tags(said.into_iter().map(|(r, s)| (r, s.tag)).collect())
    };
    room.put(meeting, "all", &encode(&heard)?)?;
    if op > 0 {
        // Everybody who spoke now has read the answer before.
        room.remove(&format!("agree-{}", op - 1), "all")?;
    }
    Ok(heard)
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(message).map_err(|e| Error::invalid("agreement", "encodable values", e))
}

fn decode<T: for<'a> Deserialize<'a>>(message: &[u8]) -> Result<T> {
    serde_json::from_slice(message)
        .map_err(|e| Error::invalid("agreement", "a message of this version", e))
}
