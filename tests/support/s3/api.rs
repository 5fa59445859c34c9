//! The S3 operations on top of [`Bucket`], as the s3s crate dispatches them.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use parking_lot::Mutex;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use super::bucket::{Bucket, Condition, Object as Stored, Refusal};

/// Put into a request's extensions: a listing answers from what was frozen.
#[derive(Debug, Clone, Copy)]
pub struct StaleListing;

/// All buckets by name.
pub type Buckets = Arc<Mutex<BTreeMap<String, Bucket>>>;

/// The service's state.
#[derive(Debug)]
pub struct Api {
    pub buckets: Buckets,
    /// Keys on a page of a listing, if the client asks for no fewer.
    pub page_keys: usize,
}

impl Api {
    fn with<T>(
        &self,
        bucket: &str,
        work: impl FnOnce(&mut Bucket) -> Result<T, Refusal>,
    ) -> S3Result<T> {
        let mut buckets = self.buckets.lock();
        let bucket = buckets.get_mut(bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        work(bucket).map_err(|refusal| match refusal {
            Refusal::NoSuchKey => s3_error!(NoSuchKey),
            Refusal::NoSuchUpload => s3_error!(NoSuchUpload),
            Refusal::PreconditionFailed => s3_error!(PreconditionFailed),
            Refusal::InvalidPart => s3_error!(InvalidPart),
            Refusal::EntityTooSmall => s3_error!(EntityTooSmall),
        })
    }

    fn object(
        &self,
        bucket: &str,
        key: &str,
        if_match: Option<&ETagCondition>,
    ) -> S3Result<Stored> {
        let found =
            |bucket: &mut Bucket| bucket.objects.get(key).cloned().ok_or(Refusal::NoSuchKey);
        let object = self.with(bucket, found)?;
        let wanted = if_match.and_then(ETagCondition::as_etag);
        if wanted.is_some_and(|wanted| wanted.value() != object.etag) {
            return Err(s3_error!(PreconditionFailed));
        }
        Ok(object)
    }
}

fn condition(if_match: Option<&ETagCondition>, if_none_match: Option<&ETagCondition>) -> Condition {
    let etag = if_match.and_then(ETagCondition::as_etag).map(|etag| etag.value().to_string());
    Condition { absent: if_none_match.is_some_and(ETagCondition::is_any), etag }
}

async fn whole(body: Option<StreamingBlob>) -> S3Result<Bytes> {
    let Some(body) = body else { return Ok(Bytes::new()) };
    let pieces: Vec<Bytes> =
        body.try_collect().await.map_err(|_| s3_error!(IncompleteBody, "the body ended early"))?;
    Ok(pieces.concat().into())
}

#[async_trait::async_trait]
impl S3 for Api {
    async fn put_object(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = request.input;
        let data = whole(input.body).await?;
        if input.content_length.is_some_and(|length| length != data.len() as i64) {
            return Err(s3_error!(IncompleteBody));
        }
        let if_ = condition(input.if_match.as_ref(), input.if_none_match.as_ref());
        let etag = self.with(&input.bucket, |bucket| bucket.put(&input.key, data, &if_))?;
        Ok(S3Response::new(PutObjectOutput {
            e_tag: Some(ETag::Strong(etag)),
            ..Default::default()
        }))
    }

    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let object = self.object(&input.bucket, &input.key, input.if_match.as_ref())?;
        let size = object.data.len() as u64;
        let range = match input.range {
            Some(range) => range.check(size).map_err(|_| s3_error!(InvalidRange))?,
            None => 0..size,
        };
        let part = object.data.slice(range.start as usize..range.end as usize);
        let length = part.len() as i64;
        let content_range = input
            .range
            .map(|_| format!("bytes {}-{}/{size}", range.start, range.end.saturating_sub(1)));
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::from(s3s::Body::from(part))),
            content_length: Some(length),
            content_range,
            e_tag: Some(ETag::Strong(object.etag)),
            last_modified: Some(object.modified.into()),
            ..Default::default()
        }))
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let object = self.object(&input.bucket, &input.key, input.if_match.as_ref())?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(object.data.len() as i64),
            e_tag: Some(ETag::Strong(object.etag)),
            last_modified: Some(object.modified.into()),
            ..Default::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let stale = request.extensions.get::<StaleListing>().is_some();
        let input = request.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = input.continuation_token.clone().or(input.start_after.clone());
        let most = input.max_keys.map_or(self.page_keys, |n| self.page_keys.min(n.max(1) as usize));
        let page = self.with(&input.bucket, |bucket| {
            let after = after.clone().unwrap_or_default();
            Ok(bucket.list(&prefix, input.delimiter.as_deref(), &after, most, stale))
        })?;
        let contents = page.objects.into_iter().map(|(key, object)| Object {
            key: Some(key),
            size: Some(object.data.len() as i64),
            e_tag: Some(ETag::Strong(object.etag)),
            last_modified: Some(object.modified.into()),
            ..Default::default()
        });
        let folders = page.folders.into_iter().map(|prefix| CommonPrefix { prefix: Some(prefix) });
        let (contents, folders): (Vec<_>, Vec<_>) = (contents.collect(), folders.collect());
        Ok(S3Response::new(ListObjectsV2Output {
            key_count: Some((contents.len() + folders.len()) as i32),
            contents: Some(contents),
            common_prefixes: Some(folders),
            is_truncated: Some(page.more_after.is_some()),
            next_continuation_token: page.more_after,
            continuation_token: input.continuation_token,
            delimiter: input.delimiter,
            max_keys: Some(most as i32),
            name: Some(input.bucket),
            prefix: input.prefix,
            ..Default::default()
        }))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        self.with(&input.bucket, |bucket| Ok(bucket.objects.remove(&input.key)))?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = request.input;
        let keys: Vec<String> = input.delete.objects.into_iter().map(|o| o.key).collect();
        self.with(&input.bucket, |bucket| {
            bucket.objects.retain(|key, _| !keys.contains(key));
            Ok(())
        })?;
        let gone = |key| DeletedObject { key: Some(key), ..Default::default() };
        let deleted = Some(keys.into_iter().map(gone).collect());
        Ok(S3Response::new(DeleteObjectsOutput { deleted, ..Default::default() }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = request.input;
        let id = self.with(&input.bucket, |bucket| Ok(bucket.start_upload(&input.key)))?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..Default::default()
        }))
    }

    async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let data = whole(input.body).await?;
        let put = |bucket: &mut Bucket| bucket.put_part(&input.upload_id, input.part_number, data);
        let etag = self.with(&input.bucket, put)?;
        Ok(S3Response::new(UploadPartOutput {
            e_tag: Some(ETag::Strong(etag)),
            ..Default::default()
        }))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        let if_ = condition(input.if_match.as_ref(), input.if_none_match.as_ref());
        let parts = input.multipart_upload.and_then(|named| named.parts).unwrap_or_default();
        let named: Vec<_> = parts
            .into_iter()
            .map(|part| (part.part_number.unwrap_or(0), part.e_tag.map(ETag::into_value)))
            .collect();
        let done = |bucket: &mut Bucket| bucket.complete(&input.upload_id, &named, &if_);
        let etag = self.with(&input.bucket, done)?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(ETag::Strong(etag)),
            ..Default::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = request.input;
        self.with(&input.bucket, |bucket| bucket.abort(&input.upload_id))?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = request.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = (input.key_marker.clone(), input.upload_id_marker.clone());
        let mut uploads: Vec<MultipartUpload> = self.with(&input.bucket, |bucket| {
            let below = bucket.uploads.iter().filter(|(_, upload)| upload.key.starts_with(&prefix));
            let later = below
                .filter(|(id, u)| (Some(&u.key), Some(*id)) > (after.0.as_ref(), after.1.as_ref()));
            let shown = later.map(|(id, upload)| MultipartUpload {
                key: Some(upload.key.clone()),
                upload_id: Some(id.clone()),
                initiated: Some(upload.started.into()),
                ..Default::default()
            });
            Ok(shown.collect())
        })?;
        uploads.sort_by_key(|upload| (upload.key.clone(), upload.upload_id.clone()));
        let most = input.max_uploads.map_or(self.page_keys, |n| self.page_keys.min(n as usize));
        let is_truncated = uploads.len() > most;
        uploads.truncate(most);
        let last = uploads.last().filter(|_| is_truncated);
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            is_truncated: Some(is_truncated),
            next_key_marker: last.and_then(|upload| upload.key.clone()),
            next_upload_id_marker: last.and_then(|upload| upload.upload_id.clone()),
            prefix: input.prefix,
            uploads: Some(uploads),
            ..Default::default()
        }))
    }
}
