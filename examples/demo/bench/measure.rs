//! Time on a device: samples, interleaved pairs, and what is said about them.

use continuous_attention::{Gpu, wgpu};
use std::time::{Duration, Instant};

/// Why a measurement can't be made, in a sentence.
pub type Measured<T> = Result<T, Box<dyn std::error::Error>>;

/// What is timed: records the same work each time it is called.
pub type Record<'a> = dyn Fn(&mut wgpu::ComputePass) + 'a;

/// Times work on one device.
pub struct Timer {
    gpu: Gpu,
    /// None: wall time.
    timestamps: Option<Timestamps>,
}

struct Timestamps {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readable: wgpu::Buffer,
    seconds_per_tick: f64,
}

/// Two timestamps.
const BYTES: u64 = 16;

impl Timer {
    /// Timestamps of the device where it has them. A software adapter's say no more than the clock on the wall does,
    /// which counts everything that a caller waits for.
    pub fn new(gpu: &Gpu) -> Timer {
        let software = gpu.info().device_type == wgpu::DeviceType::Cpu;
        let has = gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY);
        Timer { gpu: gpu.clone(), timestamps: (has && !software).then(|| Timestamps::new(gpu)) }
    }

    /// Wall time, whatever the device has: for benches/peers.
    #[allow(dead_code)]
    pub fn wall(gpu: &Gpu) -> Timer {
        Timer { gpu: gpu.clone(), timestamps: None }
    }

    /// In words.
    pub fn clock(&self) -> &'static str {
        if self.timestamps.is_some() { "timestamps of the device" } else { "wall time" }
    }

    /// Seconds that recording `times` over in one pass takes, in all.
    pub fn seconds(&self, record: &Record, times: u32) -> Measured<f64> {
        let device = self.gpu.device();
        let mut encoder = device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("timed"),
            timestamp_writes: self.timestamps.as_ref().map(|timestamps| wgpu::ComputePassTimestampWrites {
                query_set: &timestamps.queries,
                beginning_of_pass_write_index: Some(0),
                end_of_pass_write_index: Some(1),
            }),
        });
        (0..times).for_each(|_| record(&mut pass));
        drop(pass);
        if let Some(timestamps) = &self.timestamps {
            encoder.resolve_query_set(&timestamps.queries, 0..2, &timestamps.resolved, 0);
            encoder.copy_buffer_to_buffer(&timestamps.resolved, 0, &timestamps.readable, 0, BYTES);
        }
        let commands = encoder.finish();
        let begin = Instant::now();
        self.gpu.queue().submit([commands]);
        device.poll(wgpu::PollType::wait_indefinitely())?;
        let wall = begin.elapsed().as_secs_f64();
        self.timestamps.as_ref().map_or(Ok(wall), |timestamps| timestamps.read(device))
    }
}

impl Timestamps {
    fn new(gpu: &Gpu) -> Timestamps {
        let buffer = |usage| {
            let label = Some("timestamps");
            let descriptor = wgpu::BufferDescriptor { label, size: BYTES, usage, mapped_at_creation: false };
            gpu.device().create_buffer(&descriptor)
        };
        Timestamps {
            queries: gpu.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("timestamps"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
            readable: buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST),
            seconds_per_tick: f64::from(gpu.queue().get_timestamp_period()) * 1e-9,
        }
    }

    fn read(&self, device: &wgpu::Device) -> Measured<f64> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.readable.slice(..).map_async(wgpu::MapMode::Read, move |result| drop(sender.send(result)));
        device.poll(wgpu::PollType::wait_indefinitely())?;
        receiver.recv()??;
        let bytes = self.readable.slice(..).get_mapped_range()?.to_vec();
        self.readable.unmap();
        let ticks = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Ok(ticks(8).saturating_sub(ticks(0)) as f64 * self.seconds_per_tick)
    }
}

/// Work whose first run, which compiles and touches memory for the first time, is over.
pub struct Timed<'a> {
    timer: &'a Timer,
    record: Box<Record<'a>>,
    /// Runs of a sample: enough that it lasts [`SAMPLE`].
    times: u32,
    /// What one run took when it was tried out.
    pub tried: f64,
}

/// What a sample should last at least: clocks and submissions cost some microseconds.
pub const SAMPLE: f64 = 4e-3;

impl<'a> Timed<'a> {
    pub fn new(timer: &'a Timer, record: impl Fn(&mut wgpu::ComputePass) + 'a) -> Measured<Timed<'a>> {
        let record: Box<Record<'a>> = Box::new(record);
        timer.seconds(&*record, 1)?;
        let tried = timer.seconds(&*record, 1)?;
        let times = (SAMPLE / tried.max(1e-7)).ceil().clamp(1.0, 1000.0) as u32;
        Ok(Timed { timer, record, times, tried })
    }

    /// Seconds of one run.
    pub fn sample(&self) -> Measured<f64> {
        Ok(self.timer.seconds(&*self.record, self.times)? / f64::from(self.times))
    }
}

/// How long to go on.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Stop when so much time is over, if [`LEAST`] pairs are there.
    pub time: Duration,
    /// Make so many pairs whatever it takes.
    pub pairs: Option<usize>,
}

/// Pairs that are made however slow they are.
pub const LEAST: usize = 5;
/// Pairs that are enough where time allows.
pub const ENOUGH: usize = 30;

impl Budget {
    fn goes_on(&self, made: usize, begin: Instant) -> bool {
        match self.pairs {
            Some(pairs) => made < pairs,
            None => made < LEAST || (made < ENOUGH && begin.elapsed() < self.time),
        }
    }
}

/// A median and the interval that holds it with a probability of 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    pub count: usize,
}

impl Spread {
    /// Ranks of the interval from the binomial distribution's normal limit, n/2 ± 0.98 √n: no shape of distribution is
    /// assumed. With few samples it is all of them.
    pub fn of(mut samples: Vec<f64>) -> Spread {
        samples.sort_by(f64::total_cmp);
        let count = samples.len();
        let (half, reach) = (count as f64 / 2.0, 0.98 * (count as f64).sqrt());
        let low = (half - reach).floor().max(0.0) as usize;
        let high = (half + reach).ceil().min(count as f64 - 1.0) as usize;
        let median = (samples[(count - 1) / 2] + samples[count / 2]) / 2.0;
        Spread { median, low: samples[low], high: samples[high], count }
    }
}

/// Two sides, timed in turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairs {
    /// First over second, pair by pair.
    pub ratio: Spread,
    /// Seconds.
    pub first: Spread,
    pub second: Spread,
}

/// Times two sides pair by pair, A B B A …: what drifts meets both.
pub fn interleave(
    budget: &Budget,
    mut first: impl FnMut() -> Measured<f64>,
    mut second: impl FnMut() -> Measured<f64>,
) -> Measured<Pairs> {
    let begin = Instant::now();
    let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
    while budget.goes_on(firsts.len(), begin) {
        if firsts.len() % 2 == 0 {
            firsts.push(first()?);
            seconds.push(second()?);
        } else {
            seconds.push(second()?);
            firsts.push(first()?);
        }
    }
    let ratios = firsts.iter().zip(&seconds).map(|(first, second)| first / second).collect();
    Ok(Pairs { ratio: Spread::of(ratios), first: Spread::of(firsts), second: Spread::of(seconds) })
}

/// Times one side.
pub fn alone(budget: &Budget, mut sample: impl FnMut() -> Measured<f64>) -> Measured<Spread> {
    let begin = Instant::now();
    let mut samples = Vec::new();
    while budget.goes_on(samples.len(), begin) {
        samples.push(sample()?);
    }
    Ok(Spread::of(samples))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_their_intervals() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!(spread, Spread { median: 2.0, low: 1.0, high: 3.0, count: 3 });
        assert_eq!(Spread::of(vec![1.0, 4.0]).median, 2.5);
        assert_eq!(Spread::of(vec![7.0]), Spread { median: 7.0, low: 7.0, high: 7.0, count: 1 });
        // One outlier in thirty moves nothing.
        let mut samples: Vec<f64> = (0..30).map(f64::from).collect();
        samples[29] = 1e9;
        let spread = Spread::of(samples);
        assert_eq!((spread.median, spread.low, spread.high), (14.5, 9.0, 21.0));
    }

    #[test]
    fn pairs_alternate_and_end() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name: char, seconds: f64| {
            order.borrow_mut().push(name);
            Ok(seconds)
        };
        let budget = Budget { time: Duration::ZERO, pairs: Some(4) };
        let pairs = interleave(&budget, || side('A', 3.0), || side('B', 2.0)).unwrap();
        assert_eq!(*order.borrow(), "ABBAABBA");
        assert_eq!((pairs.ratio.median, pairs.first.median, pairs.ratio.count), (1.5, 3.0, 4));
        // Without a number of pairs it is a few when there is no time, and never more than enough.
        for (time, count) in [(Duration::ZERO, LEAST), (Duration::from_secs(3600), ENOUGH)] {
            assert_eq!(alone(&Budget { time, pairs: None }, || Ok(1.0)).unwrap().count, count);
        }
        assert!(interleave(&budget, || Ok(1.0), || Err("lost".into())).is_err());
    }
}
