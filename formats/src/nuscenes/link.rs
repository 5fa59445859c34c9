//! Every reference checked, every record in its place: samples by scene and time, sensor records
//! by channel in unbroken chains, annotations by sample.

use super::CHANNELS_MAX;
use super::rows::{Annotation, CalibratedSensor, EgoPose, Modality, Sample, SampleData, Scene};
use super::tables::{Table, Tables};
use super::token::TokenId;
use crate::error::{Error, Result};

/// Neighbours further apart than this say nothing about an object's speed (the devkit's limit).
const VELOCITY_GAP_MAX_S: f64 = 1.5;

/// One sensor channel with all its records.
#[derive(Debug)]
pub struct Channel {
    /// Its name, e.g. `LIDAR_TOP`.
    pub name: String,
    /// What it measures.
    pub modality: Modality,
    /// Its records by scene and time.
    pub records: Vec<Record>,
}

/// A sensor record in its channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Row of the sample_data table.
    pub data: u32,
    /// Its time, nanoseconds since the Unix epoch.
    pub timestamp_ns: i64,
    /// Row of its scene.
    pub scene: u32,
    /// Records with the same number are linked without a break.
    pub chain: u32,
    /// Position in [`Linked`]'s samples, if this is a sample's key frame.
    pub sample: Option<u32>,
}

/// The annotations of one sample.
pub type Annotations<'a> =
    std::iter::Map<std::slice::Iter<'a, (u32, u32)>, fn(&'a (u32, u32)) -> usize>;

/// Tables whose references hold.
#[derive(Debug)]
pub struct Linked {
    tables: Tables,
    /// Rows of the sample table by scene and time.
    order: Vec<u32>,
    channels: Vec<Channel>,
    /// (sample position, annotation row), sorted.
    annotations: Vec<(u32, u32)>,
}

impl Tables {
    /// Checks every reference and orders the records.
    pub fn link(self) -> Result<Linked> {
        for table in super::REQUIRED_TABLES {
            if !self.is_present(table) {
                return Err(Error::MissingTable { table });
            }
        }
        self.check_small_tables()?;
        let order = self.order_samples()?;
        let mut position = vec![0_u32; order.len()];
        for (at, row) in order.iter().enumerate() {
            position[*row as usize] = at as u32;
        }
        let cut = self.cut_scenes();
        self.check_samples(&order, &cut)?;
        let channels = self.channels(&position, &cut)?;
        let annotations = self.annotations(&position, &cut)?;
        Ok(Linked { tables: self, order, channels, annotations })
    }

    fn is_present(&self, table: &str) -> bool {
        match table {
            "sensor" => self.sensor.present,
            "calibrated_sensor" => self.calibrated_sensor.present,
            "ego_pose" => self.ego_pose.present,
            "scene" => self.scene.present,
            "sample" => self.sample.present,
            "sample_data" => self.sample_data.present,
            _ => true,
        }
    }

    fn dangling<T>(
        &self,
        (table, column, record): (&str, &'static str, TokenId),
        token: Option<TokenId>,
        target: &Table<T>,
    ) -> Error {
        Error::Dangling {
            table: table.to_string(),
            column,
            record: self.tokens.text(record),
            token: token.map(|t| self.tokens.text(t)).unwrap_or_default(),
            target: target.name,
        }
    }

    /// Row of a reference that must hold.
    fn follow<T>(
        &self,
        from: (&'static str, &'static str, TokenId),
        token: Option<TokenId>,
        target: &Table<T>,
    ) -> Result<usize> {
        target.row(token).ok_or_else(|| self.dangling(from, token, target))
    }

    fn check_small_tables(&self) -> Result<()> {
        for row in &self.calibrated_sensor.rows {
            self.follow(
                ("calibrated_sensor", "sensor_token", row.token),
                row.sensor,
                &self.sensor,
            )?;
        }
        if self.log.present {
            for row in &self.scene.rows {
                self.follow(("scene", "log_token", row.token), row.log, &self.log)?;
            }
        }
        if self.category.present {
            for (token, row) in &self.instance.by_token {
                let category = self.instance.rows[*row as usize];
                self.follow(("instance", "category_token", *token), category, &self.category)?;
            }
        }
        Ok(())
    }

    /// Scenes of which the tables hold fewer samples than there were.
    fn cut_scenes(&self) -> Vec<bool> {
        let mut samples = vec![0_u64; self.scene.rows.len()];
        for sample in &self.sample.rows {
            if let Some(scene) = self.scene.row(sample.scene) {
                samples[scene] += 1;
            }
        }
        self.scene.rows.iter().zip(samples).map(|(scene, found)| found < scene.samples).collect()
    }

    fn order_samples(&self) -> Result<Vec<u32>> {
        let mut order = Vec::with_capacity(self.sample.rows.len());
        for (row, sample) in self.sample.rows.iter().enumerate() {
            let from = ("sample", "scene_token", sample.token);
            let scene = self.follow(from, sample.scene, &self.scene)?;
            order.push((scene, sample.timestamp_ns, row as u32));
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, _, row)| row).collect())
    }

    fn check_samples(&self, order: &[u32], cut: &[bool]) -> Result<()> {
        for (scene, _) in self.scene.rows.iter().zip(cut).filter(|(_, cut)| !**cut) {
            if scene.samples > 0 || scene.first.is_some() {
                let token = scene.token;
                self.follow(("scene", "first_sample_token", token), scene.first, &self.sample)?;
                self.follow(("scene", "last_sample_token", token), scene.last, &self.sample)?;
            }
        }
        let mut before = None;
        for row in order {
            let sample = &self.sample.rows[*row as usize];
            let scene = self.scene.row(sample.scene);
            let cut = scene.is_none_or(|scene| cut[scene]);
            let links = Links { table: &self.sample, prev: sample.prev, next: sample.next };
            let previous = before.filter(|(at, _)| *at == scene).map(|(_, row)| row);
            self.check_links(&links, sample.token, previous, cut)?;
            before = Some((scene, *row));
        }
        Ok(())
    }

    /// `prev` must be the record before in time, or none, or (in a cut scene) out of the table.
    /// As time is strictly ordered this excludes cycles too. True if the chain goes on.
    fn check_links<T>(
        &self,
        links: &Links<'_, T>,
        record: TokenId,
        before: Option<u32>,
        cut: bool,
    ) -> Result<bool> {
        let Links { table, prev, next } = links;
        if next.is_some() && table.row(*next).is_none() && !cut {
            return Err(self.dangling((table.name, "next", record), *next, table));
        }
        match (prev, table.row(*prev)) {
            (None, _) => Ok(false),
            (Some(_), None) if cut => Ok(false),
            (Some(_), None) => Err(self.dangling((table.name, "prev", record), *prev, table)),
            (Some(_), Some(row)) if before == Some(row as u32) => Ok(true),
            (Some(prev), Some(_)) => Err(Error::BadRecord {
                table: table.name,
                column: "prev",
                record: self.tokens.text(record),
                expected: "the record before it in time, of the same scene and channel",
                found: self.tokens.text(*prev),
            }),
        }
    }

    fn channels(&self, position: &[u32], cut: &[bool]) -> Result<Vec<Channel>> {
        let mut channels: Vec<Channel> = Vec::new();
        let mut of_sensor = Vec::with_capacity(self.sensor.rows.len());
        for sensor in &self.sensor.rows {
            let known = channels.iter().position(|c| c.name == sensor.channel);
            of_sensor.push(known.unwrap_or(channels.len()));
            if known.is_none() {
                if channels.len() == CHANNELS_MAX {
                    let limit = CHANNELS_MAX as u64;
                    let found = limit + 1;
                    return Err(Error::TooLarge { what: "channels", offset: 0, found, limit });
                }
                let name = sensor.channel.clone();
                channels.push(Channel { name, modality: sensor.modality, records: Vec::new() });
            }
        }
        for (data, row) in self.sample_data.rows.iter().enumerate() {
            let (sensor, sample) = self.check_references(row)?;
            let record = Record {
                data: data as u32,
                timestamp_ns: row.timestamp_ns,
                scene: self.scene.row(self.sample.rows[sample].scene).unwrap_or(0) as u32,
                chain: 0,
                sample: row.is_key_frame.then(|| position[sample]),
            };
            channels[of_sensor[sensor]].records.push(record);
        }
        for channel in &mut channels {
            self.chain(channel, cut)?;
        }
        channels.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(channels)
    }

    /// Sensor row and sample row of a sensor record; all its other references are checked.
    fn check_references(&self, row: &SampleData) -> Result<(usize, usize)> {
        let from = |column| ("sample_data", column, row.token);
        let sample = self.follow(from("sample_token"), row.sample, &self.sample)?;
        self.follow(from("ego_pose_token"), row.ego_pose, &self.ego_pose)?;
        let calibrated = &self.calibrated_sensor;
        let mounted =
            self.follow(from("calibrated_sensor_token"), row.calibrated_sensor, calibrated)?;
        let mounted = &calibrated.rows[mounted];
        let from = ("calibrated_sensor", "sensor_token", mounted.token);
        Ok((self.follow(from, mounted.sensor, &self.sensor)?, sample))
    }

    /// Sorts a channel's records by scene and time and numbers its chains.
    fn chain(&self, channel: &mut Channel, cut: &[bool]) -> Result<()> {
        channel.records.sort_by_key(|r| (r.scene, r.timestamp_ns, r.data));
        let mut before: Option<Record> = None;
        let mut chains = 0;
        let mut keyframes = std::collections::HashSet::new();
        for record in &mut channel.records {
            let row = &self.sample_data.rows[record.data as usize];
            let cut = cut.get(record.scene as usize).is_none_or(|cut| *cut);
            let links = Links { table: &self.sample_data, prev: row.prev, next: row.next };
            let previous = before
                .filter(|r| r.scene == record.scene && r.timestamp_ns < record.timestamp_ns)
                .map(|r| r.data);
            let goes_on = self.check_links(&links, row.token, previous, cut)?;
            chains += u32::from(!goes_on);
            record.chain = chains;
            if let Some(sample) = record.sample
                && !keyframes.insert(sample)
            {
                return Err(Error::BadRecord {
                    table: "sample_data",
                    column: "is_key_frame",
                    record: self.tokens.text(row.token),
                    expected: "true once per sample and channel",
                    found: format!("a second key frame of {}", channel.name),
                });
            }
            before = Some(*record);
        }
        Ok(())
    }

    fn annotations(&self, position: &[u32], cut: &[bool]) -> Result<Vec<(u32, u32)>> {
        let mut all = Vec::with_capacity(self.sample_annotation.rows.len());
        for (at, row) in self.sample_annotation.rows.iter().enumerate() {
            let from = |column| ("sample_annotation", column, row.token);
            let sample = self.follow(from("sample_token"), row.sample, &self.sample)?;
            self.follow(from("instance_token"), row.instance, &self.instance)?;
            if self.visibility.present && row.visibility.is_some() {
                self.follow(from("visibility_token"), row.visibility, &self.visibility)?;
            }
            for attribute in row.attributes.iter().filter(|_| self.attribute.present) {
                self.follow(from("attribute_tokens"), Some(*attribute), &self.attribute)?;
            }
            let cut = self.scene.row(self.sample.rows[sample].scene).is_none_or(|s| cut[s]);
            for (column, link) in [("prev", row.prev), ("next", row.next)] {
                if !cut && link.is_some() {
                    self.follow(from(column), link, &self.sample_annotation)?;
                }
            }
            all.push((position[sample], at as u32));
        }
        all.sort_unstable();
        Ok(all)
    }
}

struct Links<'a, T> {
    table: &'a Table<T>,
    prev: Option<TokenId>,
    next: Option<TokenId>,
}

impl Linked {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Sample at a position: by scene (table order), then time.
    pub fn sample(&self, position: usize) -> Option<&Sample> {
        self.tables.sample.rows.get(*self.order.get(position)? as usize)
    }

    /// Scene of a sample.
    pub fn scene(&self, sample: &Sample) -> Option<&Scene> {
        self.tables.scene.rows.get(self.tables.scene.row(sample.scene)?)
    }

    /// Row of a sample's scene in its table.
    pub fn scene_row(&self, sample: &Sample) -> u32 {
        self.tables.scene.row(sample.scene).unwrap_or(0) as u32
    }

    /// The channels by name.
    pub fn channels(&self) -> &[Channel] {
        &self.channels
    }

    /// Text of a token.
    pub fn token(&self, token: TokenId) -> String {
        self.tables.tokens.text(token)
    }

    /// Row of the sample_data table.
    pub fn data(&self, row: u32) -> Option<&SampleData> {
        self.tables.sample_data.rows.get(row as usize)
    }

    /// File of a sensor record, relative to the data root.
    pub fn filename(&self, data: &SampleData) -> &str {
        let (start, len) = data.filename;
        self.tables.filenames.get(start as usize..start as usize + len as usize).unwrap_or_default()
    }

    /// How the record's sensor is mounted.
    pub fn calibrated_sensor(&self, data: &SampleData) -> Option<&CalibratedSensor> {
        let table = &self.tables.calibrated_sensor;
        table.rows.get(table.row(data.calibrated_sensor)?)
    }

    /// Where the car was when the record was taken.
    pub fn ego_pose(&self, data: &SampleData) -> Option<&EgoPose> {
        self.tables.ego_pose.rows.get(self.tables.ego_pose.row(data.ego_pose)?)
    }

    /// Whether the tables have annotations at all.
    pub fn has_annotations(&self) -> bool {
        self.tables.sample_annotation.present
    }

    /// Rows, for [`Self::annotation`], of the annotations of the sample at a position.
    pub fn annotations(&self, position: usize) -> Annotations<'_> {
        let at = position as u32;
        let start = self.annotations.partition_point(|(sample, _)| *sample < at);
        let end = self.annotations.partition_point(|(sample, _)| *sample <= at);
        self.annotations[start..end].iter().map(|(_, row)| *row as usize)
    }

    /// An annotation.
    pub fn annotation(&self, row: usize) -> Option<&Annotation> {
        self.tables.sample_annotation.rows.get(row)
    }

    /// Class name of an annotation; empty without a category table.
    pub fn category(&self, annotation: &Annotation) -> &str {
        let row = self.tables.instance.row(annotation.instance);
        let category = row.and_then(|row| self.tables.instance.rows[row]);
        let row = self.tables.category.row(category);
        row.map_or("", |row| &self.tables.category.rows[row])
    }

    /// Velocity in m/s in the global frame by the devkit's rule: central difference of the
    /// object's neighbouring annotations (one-sided at the ends of its track); `None` where it has
    /// no neighbour or they are more than 1.5 s apart per step.
    pub fn velocity_mps(&self, annotation: &Annotation) -> Option<[f64; 3]> {
        let table = &self.tables.sample_annotation;
        let neighbour = |link| table.row(link).map(|row| &table.rows[row]);
        let (prev, next) = (neighbour(annotation.prev), neighbour(annotation.next));
        let steps = [prev, next].iter().flatten().count();
        let (first, last) = (prev.unwrap_or(annotation), next.unwrap_or(annotation));
        let time_ns = |a: &Annotation| {
            self.tables.sample.row(a.sample).map(|row| self.tables.sample.rows[row].timestamp_ns)
        };
        let elapsed_s = time_ns(last)?.checked_sub(time_ns(first)?)? as f64 * 1e-9;
        if elapsed_s <= 0.0 || elapsed_s > VELOCITY_GAP_MAX_S * steps as f64 {
            return None;
        }
        let (a, b) = (first.translation_m, last.translation_m);
        Some(std::array::from_fn(|axis| (b[axis] - a[axis]) / elapsed_s))
    }
}
