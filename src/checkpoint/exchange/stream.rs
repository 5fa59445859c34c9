//! Writes one planned file in windows: whoever has the bytes of a piece fills them in, checksums
//! are taken while the window is in the cache, and full windows go to the store. Memory is a few
//! windows, whatever the size of the file.

use futures::future::LocalBoxFuture;

use crate::checkpoint::layout::{FileImage, crc32c, crc32c_join};
use crate::error::Result;
use crate::memory::{Arena, Buffer};
use crate::storage::Writer;

/// Bytes per write.
pub const WINDOW_BYTES: usize = 8 << 20;
/// Windows that are warm memory: more can be in flight only on stores that gather parts first.
const WARM_BYTES: usize = 8 * WINDOW_BYTES;

/// Where the bytes of pieces come from.
pub trait Feed {
    /// Fills `out` with the bytes of piece `piece` from byte `at` on. Pieces are asked for one
    /// after the other, as they lie in the file, and each from its first byte to its last.
    fn fill<'a>(
        &'a mut self,
        piece: usize,
        at: u64,
        out: &'a mut [u8],
    ) -> LocalBoxFuture<'a, Result<()>>;

    /// Told which pieces come, in order, before the first is asked for.
    fn begin(&mut self, _order: &[usize]) {}
}

/// Checksums of a written file: of its header, of each entry, and of all of it.
#[derive(Debug, Default)]
pub struct Sums {
    /// Of the header.
    pub header: u32,
    /// Of the entries, in their order.
    pub entries: Vec<u32>,
    /// Of the file.
    pub whole: u32,
}

/// Memory for windows, re-used.
#[derive(Debug)]
pub struct Windows(Arena);

impl Default for Windows {
    fn default() -> Self {
        Self(Arena::new(WARM_BYTES))
    }
}

impl Windows {
    fn take(&self, bytes: u64) -> Buffer {
        let len = bytes.min(WINDOW_BYTES as u64) as usize;
        let warm = if len < WINDOW_BYTES { None } else { self.0.try_alloc(len) };
        warm.unwrap_or_else(|| Buffer::heap(len))
    }
}

/// Writes all bytes of `image`.
pub async fn write_stream(
    writer: &mut dyn Writer,
    image: &FileImage,
    windows: &Windows,
    feed: &mut dyn Feed,
) -> Result<Sums> {
    let order: Vec<usize> = image.entries.iter().filter_map(|e| e.piece).collect();
    feed.begin(&order);
    let mut out = Output { writer, windows, left: image.size_bytes, window: None, fill: 0 };
    let mut sums = Sums { header: crc32c(&image.header), ..Sums::default() };
    out.append(&image.header).await?;
    sums.whole = sums.header;
    for entry in &image.entries {
        let (mut sum, mut at) = (0, 0);
        while at < entry.length {
            let part = out.room(entry.length - at);
            match entry.piece {
                Some(piece) => feed.fill(piece, at, part).await?,
                None => part.fill(0),
            }
            let n = part.len();
            sum = crc32c_join(sum, crc32c(part), n as u64);
            at += n as u64;
            out.advance(n).await?;
        }
        sums.whole = crc32c_join(sums.whole, sum, entry.length);
        sums.entries.push(sum);
    }
    out.flush().await?;
    Ok(sums)
}

struct Output<'a> {
    writer: &'a mut dyn Writer,
    windows: &'a Windows,
    /// Bytes of the file that are in no window yet.
    left: u64,
    window: Option<Buffer>,
    fill: usize,
}

impl Output<'_> {
    /// The rest of the window, at most `want` bytes of it.
    fn room(&mut self, want: u64) -> &mut [u8] {
        let (windows, left) = (self.windows, &mut self.left);
        let window = self.window.get_or_insert_with(|| {
            let window = windows.take((*left).max(1));
            *left -= (window.len() as u64).min(*left);
            window
        });
        let end =
            window.len().min(self.fill.saturating_add(want.min(WINDOW_BYTES as u64) as usize));
        &mut window[self.fill..end]
    }

    async fn advance(&mut self, n: usize) -> Result<()> {
        self.fill += n;
        if self.window.as_ref().is_some_and(|w| self.fill == w.len()) {
            self.flush().await?;
        }
        Ok(())
    }

    async fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.room(bytes.len() as u64);
            let (now, later) = bytes.split_at(room.len());
            room.copy_from_slice(now);
            bytes = later;
            self.advance(now.len()).await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<()> {
        let Some(mut window) = self.window.take() else { return Ok(()) };
        window.set_len(self.fill);
        self.fill = 0;
        if window.is_empty() {
            return Ok(());
        }
        self.writer.write(window.into_bytes()).await
    }
}
