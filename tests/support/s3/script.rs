//! Which request meets which fault.
//!
//! A script is clauses separated by `;`: `ACTION@N` is about request number N, `ACTION@OP` about
//! every request of an operation (or `Any`), `ACTION@OP:TEXT` about those whose key contains TEXT,
//! and `ACTION@OP:TEXT:K` or `ACTION@OP:TEXT:K-L` about the K-th (to L-th) of them. The first
//! clause that fits acts; all clauses count.

/// Operations, as scripts and the log spell them.
pub const OPS: [&str; 12] = [
    "Get",
    "Head",
    "Put",
    "Delete",
    "DeleteMany",
    "List",
    "CreateUpload",
    "UploadPart",
    "Complete",
    "AbortUpload",
    "ListUploads",
    "Other",
];

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Answered with this status; nothing is done.
    Refuse(u16),
    /// The connection closes without an answer; nothing is done.
    Drop,
    /// Done, then the connection closes without an answer.
    Lose,
    /// No answer for longer than any client waits; nothing is done.
    Hang,
    /// Done, then no answer for longer than any client waits.
    HangAfter,
    /// Half of the request is read, then the connection closes; nothing is done.
    HalfRequest,
    /// Done; the connection closes after half of the answer's body.
    HalfAnswer,
    /// Done; the answer is status 200 with an error in its body, as S3 may complete an upload.
    OkWithError,
    /// A listing shows what was there when the server was frozen.
    Stale,
}

#[derive(Debug)]
struct Rule {
    fault: Fault,
    place: Place,
    matches: u64,
}

#[derive(Debug)]
enum Place {
    Number(u64),
    Operation { op: Option<&'static str>, text: String, first: u64, last: u64 },
}

/// A parsed script with its counts.
#[derive(Debug, Default)]
pub struct Script {
    rules: Vec<Rule>,
}

impl Script {
    /// Reads a script; a test with a wrong one is wrong.
    pub fn parse(text: &str) -> Self {
        let clauses = text.split(';').map(str::trim).filter(|clause| !clause.is_empty());
        Self { rules: clauses.map(rule).collect() }
    }

    /// What happens to request `number`.
    pub fn decide(&mut self, number: u64, op: &str, key: &str) -> Option<Fault> {
        let mut chosen = None;
        for rule in &mut self.rules {
            if rule.hit(number, op, key) && chosen.is_none() {
                chosen = Some(rule.fault);
            }
        }
        chosen
    }
}

impl Rule {
    fn hit(&mut self, number: u64, op: &str, key: &str) -> bool {
        match &self.place {
            Place::Number(n) => *n == number,
            Place::Operation { op: wanted, text, first, last } => {
                if wanted.is_some_and(|wanted| wanted != op) || !key.contains(text.as_str()) {
                    return false;
                }
                self.matches += 1;
                (*first..=*last).contains(&self.matches)
            }
        }
    }
}

fn rule(clause: &str) -> Rule {
    let (fault, place) = clause.split_once('@').unwrap_or_else(|| panic!("no @ in {clause}"));
    Rule { fault: self::fault(fault), place: self::place(place), matches: 0 }
}

fn fault(text: &str) -> Fault {
    match text {
        "drop" => Fault::Drop,
        "lose" => Fault::Lose,
        "hang" => Fault::Hang,
        "hang-after" => Fault::HangAfter,
        "half-request" => Fault::HalfRequest,
        "half-answer" => Fault::HalfAnswer,
        "ok-with-error" => Fault::OkWithError,
        "stale" => Fault::Stale,
        status => Fault::Refuse(status.parse().unwrap_or_else(|_| panic!("no fault {status}"))),
    }
}

fn place(text: &str) -> Place {
    if let Ok(number) = text.parse() {
        return Place::Number(number);
    }
    let mut parts = text.splitn(3, ':');
    let name = parts.next().unwrap_or_default();
    let op = OPS.iter().find(|known| **known == name).copied();
    assert!(op.is_some() || name == "Any", "no operation {name}");
    let text = parts.next().unwrap_or_default().to_string();
    let (first, last) = match parts.next() {
        None => (1, u64::MAX),
        Some(range) => {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            (first.parse().unwrap(), last.parse().unwrap())
        }
    };
    Place::Operation { op, text, first, last }
}

#[test]
fn clauses_choose_requests() {
    let run = [("Put", "a"), ("Put", "b/m"), ("Get", "b/m"), ("Put", "b/m"), ("Put", "b/m")];
    let decided = |script: &str| -> Vec<Option<Fault>> {
        let mut script = Script::parse(script);
        run.iter().zip(1..).map(|(&(op, key), n)| script.decide(n, op, key)).collect()
    };
    let at = |hits: &[usize], fault| -> Vec<Option<Fault>> {
        (0..run.len()).map(|i| hits.contains(&i).then_some(fault)).collect()
    };
    assert_eq!(decided(""), at(&[], Fault::Drop));
    assert_eq!(decided("503@2"), at(&[1], Fault::Refuse(503)));
    assert_eq!(decided("lose@Put"), at(&[0, 1, 3, 4], Fault::Lose));
    assert_eq!(decided("hang@Any:m"), at(&[1, 2, 3, 4], Fault::Hang));
    assert_eq!(decided("drop@Put:m:2"), at(&[3], Fault::Drop));
    assert_eq!(decided("half-answer@Put::2-3"), at(&[1, 3], Fault::HalfAnswer));
}
