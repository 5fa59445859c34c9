//! What a long build tells whoever waits for it.

/// Listens to a build. All methods may do nothing.
pub trait Progress: Sync {
    /// A new stage with its number of steps, if known.
    fn stage(&self, _name: &'static str, _total: Option<u64>) {}

    /// Steps done in the stage.
    fn advance(&self, _steps: u64) {}
}

/// Listens to nothing.
impl Progress for () {}
