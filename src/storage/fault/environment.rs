//! The hook through which a test or the demo puts faults into a process it starts.

use std::fs::OpenOptions;
use std::sync::Arc;

use parking_lot::Mutex;

use super::core::{Core, Log};
use super::script::FaultScript;
use super::{FaultStore, Store};
use crate::error::{Error, Result};

/// Variable that holds a fault script.
pub const FAULT_ENV: &str = "DRIVETRAIN_FAULT";
/// Variable that names the log of operations.
pub const FAULT_LOG_ENV: &str = "DRIVETRAIN_FAULT_LOG";
/// Variable by which launchers such as torchrun tell a process its rank.
const RANK_ENV: &str = "RANK";

/// One numbering for all stores of the process.
static CORE: Mutex<Option<Arc<Core>>> = Mutex::new(None);

/// Wraps `store` if the environment asks for faults or a log; else returns it as it is.
pub fn from_environment(store: Arc<dyn Store>) -> Result<Arc<dyn Store>> {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let (script, log) = (variable(FAULT_ENV), variable(FAULT_LOG_ENV));
    if script.is_none() && log.is_none() {
        return Ok(store);
    }
    let mut slot = CORE.lock();
    let core = match slot.as_ref() {
        Some(core) => Arc::clone(core),
        None => Arc::clone(slot.insert(Arc::new(core(script, log)?))),
    };
    drop(slot);
    if !core.wraps(store.uri()) {
        return Ok(store);
    }
    tracing::warn!(uri = store.uri(), "faults are injected into this store ({FAULT_ENV})");
    Ok(Arc::new(FaultStore::with_core(store, core)))
}

fn core(script: Option<String>, log: Option<String>) -> Result<Core> {
    let rank = std::env::var(RANK_ENV).ok();
    let script = FaultScript::parse(script.as_deref().unwrap_or(""))?.for_rank(rank.as_deref());
    let log = log.map(|name| open_log(&name, rank.as_deref())).transpose()?;
    Ok(Core::new(script, log))
}

fn open_log(name: &str, rank: Option<&str>) -> Result<Log> {
    let pid = std::process::id().to_string();
    let name = name.replace("{rank}", rank.unwrap_or("0")).replace("{pid}", &pid);
    let file = OpenOptions::new().create(true).append(true).open(&name);
    let file = file.map_err(|e| Error::io("open fault log", &name, e))?;
    Ok(Log { file, rank: rank.and_then(|rank| rank.parse().ok()) })
}
