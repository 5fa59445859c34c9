//! Local files: an engine (io_uring or threads) times a mode (direct or buffered).
