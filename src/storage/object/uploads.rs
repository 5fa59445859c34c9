//! Uploads in parts that nobody finished: found below a prefix, and aborted.
//!
//! A killed process leaves them; they are in no listing of objects and billed for ever. The client
//! crate has no call that lists them, so the request is made here, signed by the crate.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use quick_xml::events::Event;
use quick_xml::reader::Reader;

/// Uploads on a page, which is also S3's own limit.
const PAGE_UPLOADS: &str = "1000";
/// Pages looked at in one sweep; what is left has its turn at the next.
const PAGES_MAX: usize = 64;
/// How long a signature holds: one request.
const SIGNED_FOR: Duration = Duration::from_mins(5);
/// Tries of a listing that meets silence or a busy server, and the pause before the second.
const TRIES_MAX: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);
/// An element's text is a key, an id or a time.
const TEXT_BYTES_MAX: usize = 4096;

type Trouble = Box<dyn std::error::Error + Send + Sync>;

/// One unfinished upload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Upload {
    /// The key in the bucket.
    pub key: String,
    id: String,
    /// When it was begun, nanoseconds since the Unix epoch; 0 where that cannot be read.
    pub begun_ns: i64,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    uploads: Vec<Upload>,
    /// Key and id after which the next page begins.
    next: Option<(String, String)>,
}

/// The way to a bucket's uploads.
#[derive(Debug)]
pub(super) struct Uploads {
    pub store: Arc<AmazonS3>,
    pub client: HttpClient,
}

impl Uploads {
    /// Unfinished uploads below a prefix of keys.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Upload>, Trouble> {
        let (mut found, mut after) = (Vec::new(), None);
        for _ in 0..PAGES_MAX {
            let page = self.page(prefix, after.as_ref()).await?;
            found.extend(page.uploads);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        Ok(found)
    }

    /// Gives an upload up; one that is gone meanwhile is no error.
    pub async fn abort(&self, upload: &Upload) -> object_store::Result<()> {
        match self.store.abort_multipart(&Path::parse(&upload.key)?, &upload.id).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            done => done,
        }
    }

    async fn page(&self, prefix: &str, after: Option<&(String, String)>) -> Result<Page, Trouble> {
        let mut pause = PAUSE;
        for _ in 1..TRIES_MAX {
            match self.ask(prefix, after).await {
                Ok(Ok(page)) => return Ok(page),
                Ok(Err(refused)) => return Err(refused),
                Err(_) => tokio::time::sleep(pause).await,
            }
            pause *= 2;
        }
        self.ask(prefix, after).await?
    }

    /// The outer error may be over at the next try.
    async fn ask(
        &self,
        prefix: &str,
        after: Option<&(String, String)>,
    ) -> Result<Result<Page, Trouble>, Trouble> {
        let mut query = vec![("uploads", ""), ("max-uploads", PAGE_UPLOADS), ("prefix", prefix)];
        if let Some((key, id)) = after {
            query.extend([("key-marker", key.as_str()), ("upload-id-marker", id.as_str())]);
        }
        let options = SignedUrlOptions::default().with_query(query);
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        let (get, bucket) = (request.method().clone(), Path::default());
        let url = self.store.signed_url_opts(get, &bucket, SIGNED_FOR, &options).await?;
        *request.uri_mut() = url.as_str().parse()?;
        let answer = self.client.execute(request).await?;
        let status = answer.status();
        let body = answer.into_body().bytes().await?;
        if status.is_server_error() || status.as_u16() == 429 {
            return Err(format!("the server answered {status}").into());
        }
        if !status.is_success() {
            return Ok(Err(format!("the server answered {status}").into()));
        }
        Ok(parse(&body))
    }
}

/// Reads an answer to ListMultipartUploads.
fn parse(xml: &[u8]) -> Result<Page, Trouble> {
    let mut reader = Reader::from_reader(xml);
    let (mut page, mut truncated) = (Page::default(), false);
    let (mut next_key, mut next_id) = (String::new(), String::new());
    // Names of the open elements, and the text since the last tag.
    let (mut open, mut text) = (Vec::<String>::new(), String::new());
    loop {
        match reader.read_event()? {
            Event::Start(tag) => {
                open.push(String::from_utf8_lossy(tag.local_name().as_ref()).into_owned());
                text.clear();
                if open.len() == 2 && open[1] == "Upload" {
                    page.uploads.push(Upload::default());
                }
            }
            Event::Text(piece) => text.push_str(&piece.decode()?),
            Event::GeneralRef(name) => {
                let character = if let Some(character) = name.resolve_char_ref()? {
                    character.to_string()
                } else {
                    let name = name.decode()?;
                    let known = quick_xml::escape::resolve_predefined_entity(&name);
                    known.ok_or_else(|| format!("entity {name}"))?.to_string()
                };
                text.push_str(&character);
            }
            Event::End(_) => {
                let path: Vec<&str> = open.iter().skip(1).map(String::as_str).collect();
                let upload = page.uploads.last_mut();
                match (path.as_slice(), upload) {
                    (["IsTruncated"], _) => truncated = text == "true",
                    (["NextKeyMarker"], _) => next_key.clone_from(&text),
                    (["NextUploadIdMarker"], _) => next_id.clone_from(&text),
                    (["Upload", "Key"], Some(upload)) => upload.key.clone_from(&text),
                    (["Upload", "UploadId"], Some(upload)) => upload.id.clone_from(&text),
                    (["Upload", "Initiated"], Some(upload)) => {
                        upload.begun_ns = unix_ns(&text).unwrap_or_default();
                    }
                    _ => {}
                }
                text.clear();
                open.pop();
            }
            Event::Eof => break,
            _ => {}
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err("a text that is no key, id or time".into());
        }
    }
    if !open.is_empty() {
        return Err("the answer ends early".into());
    }
    page.next = (truncated && !next_key.is_empty()).then_some((next_key, next_id));
    Ok(page)
}

/// `2026-12-01T02:03:04.567Z` as nanoseconds since the Unix epoch.
fn unix_ns(text: &str) -> Option<i64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, by: char| -> Option<Vec<i64>> {
        text.split(by).map(|part| part.parse().ok()).collect()
    };
    let date = numbers(date, '-')?;
    let [year, month @ 1..=12, day @ 1..=31] = date[..] else { return None };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let time = numbers(time, ':')?;
    let [hour @ 0..24, minute @ 0..60, second @ 0..=60] = time[..] else { return None };
    let nanoseconds: i64 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    // Days since March 1 of year 0, when leap days come last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400);
    let days = days + (153 * m + 2) / 5 + day - 1 - 719_468;
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <Bucket>b</Bucket><KeyMarker></KeyMarker><UploadIdMarker/>
  <NextKeyMarker>run/a&amp;b&#x21;</NextKeyMarker><NextUploadIdMarker>id-2</NextUploadIdMarker>
  <MaxUploads>2</MaxUploads><IsTruncated>true</IsTruncated>
  <Upload><Key>run/x</Key><UploadId>id-1</UploadId>
    <Initiator><ID>someone</ID></Initiator><Owner><ID>z</ID></Owner>
    <StorageClass>STANDARD</StorageClass><Initiated>2026-12-01T02:03:04.5Z</Initiated></Upload>
  <Upload><Key>run/a&amp;b&#x21;</Key><UploadId>id-2</UploadId><Initiated>soon</Initiated></Upload>
  <CommonPrefixes><Prefix>photos/</Prefix></CommonPrefixes>
</ListMultipartUploadsResult>"#;

    #[test]
    fn an_answer_is_read_and_half_of_one_is_refused() {
        let page = parse(ANSWER.as_bytes()).unwrap();
        // date -u -d 2026-12-01T02:03:04Z +%s
        let begun_ns = 1_796_090_584_500_000_000;
        let one = Upload { key: "run/x".into(), id: "id-1".into(), begun_ns };
        let two = Upload { key: "run/a&b!".into(), id: "id-2".into(), begun_ns: 0 };
        assert_eq!(page.uploads, [one, two]);
        assert_eq!(page.next, Some(("run/a&b!".into(), "id-2".into())));
        for cut in 60..ANSWER.trim_end().len() {
            assert!(parse(&ANSWER.as_bytes()[..cut]).is_err(), "{cut} bytes");
        }
        let last = ANSWER.replace("true", "false");
        assert_eq!(parse(last.as_bytes()).unwrap().next, None);
        assert!(parse(ANSWER.replace("&amp;", "&none;").as_bytes()).is_err());
        let long = ANSWER.replace("run/x", &"k".repeat(TEXT_BYTES_MAX + 1));
        assert!(parse(long.as_bytes()).is_err());
    }

    #[test]
    fn times_are_those_of_date() {
        // date -u -d TEXT +%s
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:00:00.000Z", 951_825_600),
            ("2024-12-31T23:59:59Z", 1_735_689_599),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!(unix_ns(text), Some(seconds * 1_000_000_000), "{text}");
        }
        for text in ["", "2026-12-01", "2026-13-01T00:00:00Z", "2026-12-01T00:00:00+01:00", "xTyZ"]
        {
            assert_eq!(unix_ns(text), None, "{text}");
        }
        assert_eq!(unix_ns("9999999-12-01T00:00:00Z"), None, "beyond 64 bits");
    }
}
