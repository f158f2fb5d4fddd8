//! A small model around one operator. Everything but the operator is plain Rust, gradients included.
//!
//! Per reading, with x its features:
//!
//!     e = tanh(x W_e + b_e)                                     width
//!     q, k, v = e W_q + b_q, e W_k + b_k, e W_v + b_v           heads · head_dim = width each
//!     beta = sigmoid(e W_β + b_β)                               heads, for EFLA and DeltaNet
//!     o = operator(q, k, v, beta)                               width
//!     h = tanh([e, o] W_h + b_h)                                width
//!     y = h W_y + b_y                                           1, the predicted change
//!
//! Tensors are rows, one a reading of every sequence: `[B·T, width]`.

use crate::data::{Batch, FEATURES};
use crate::operator::{Kind, Operator, Size};
use continuous_attention::{Gpu, Result};
use fastrand::Rng;
use std::time::{Duration, Instant};

pub struct Model {
    size: Size,
    embed: Dense,
    /// None: the model sees nothing but the last reading.
    mixer: Option<Mixer>,
    hidden: Dense,
    output: Dense,
    pub parameters: Vec<f32>,
    /// Time spent waiting for the device.
    pub device_time: Duration,
}

/// The operator and what feeds it.
struct Mixer {
    projections: [Dense; 3],
    beta: Option<Dense>,
    operator: Operator,
}

/// What the backward pass needs of the forward pass.
struct Trace {
    e: Vec<f32>,
    /// q, k, v, beta as [`Operator::forward`] takes them.
    inputs: Vec<f32>,
    joined: Vec<f32>,
    h: Vec<f32>,
    y: Vec<f32>,
}

impl Model {
    /// Equal seeds give equal parameters, whatever the operator; beta's come last.
    pub fn new(gpu: &Gpu, kind: Option<Kind>, size: Size, seed: u64) -> Result<Model> {
        let width = size.width();
        let mut end = 0;
        let mut dense = |inputs, outputs| {
            let dense = Dense { inputs, outputs, start: end };
            end += dense.parameters();
            dense
        };
        let [embed, hidden, output] = [dense(FEATURES, width), dense(2 * width, width), dense(width, 1)];
        let mixer = match kind {
            None => None,
            Some(kind) => Some(Mixer {
                projections: [(); 3].map(|()| dense(width, width)),
                beta: kind.has_beta().then(|| dense(width, size.heads)),
                operator: Operator::new(gpu, kind, &size)?,
            }),
        };
        let mut model =
            Model { size, embed, mixer, hidden, output, parameters: vec![0.0; end], device_time: Duration::ZERO };
        let mut rng = Rng::with_seed(seed);
        let layers = [&model.embed, &model.hidden, &model.output].into_iter();
        let mixers = model.mixer.iter().flat_map(|mixer| mixer.projections.iter().chain(&mixer.beta));
        layers.chain(mixers).for_each(|layer| layer.initialize(&mut model.parameters, &mut rng));
        Ok(model)
    }

    /// The predicted changes, `[B, T]`.
    pub fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>> {
        Ok(self.forward(batch)?.y)
    }

    fn forward(&mut self, batch: &Batch) -> Result<Trace> {
        let (size, parameters) = (&self.size, &self.parameters);
        let e = map(self.embed.forward(parameters, &batch.features), f32::tanh);
        let (mut inputs, mut o) = (Vec::new(), vec![0.0; size.elements()]);
        if let Some(mixer) = &self.mixer {
            inputs = mixer.projections.iter().flat_map(|projection| projection.forward(parameters, &e)).collect();
            if let Some(beta) = &mixer.beta {
                let beta = map(beta.forward(parameters, &e), |x| 1.0 / (1.0 + (-x).exp()));
                inputs.extend(exchange(&beta, size.tokens, size.heads));
            }
            let start = Instant::now();
            o = mixer.operator.forward(&inputs, &batch.intervals)?;
            self.device_time += start.elapsed();
        }
        let rows = e.chunks(size.width()).zip(o.chunks(size.width()));
        let joined: Vec<f32> = rows.flat_map(|(e, o)| e.iter().chain(o)).copied().collect();
        let h = map(self.hidden.forward(parameters, &joined), f32::tanh);
        let y = self.output.forward(parameters, &h);
        Ok(Trace { e, inputs, joined, h, y })
    }

    /// The mean squared error over the predictions that count, and its gradient.
    pub fn loss_and_gradient(&mut self, batch: &Batch) -> Result<(f64, Vec<f32>)> {
        let trace = self.forward(batch)?;
        let count = batch.counted.iter().filter(|&&counted| counted).count() as f64;
        let errors = trace.y.iter().zip(&batch.targets).zip(&batch.counted);
        let errors: Vec<f32> = errors.map(|((y, target), &counted)| if counted { y - target } else { 0.0 }).collect();
        let loss = errors.iter().map(|&error| f64::from(error).powi(2)).sum::<f64>() / count;
        let d_y = map(errors, |error| 2.0 * error / count as f32);
        Ok((loss, self.backward(batch, &trace, &d_y)?))
    }

    fn backward(&mut self, batch: &Batch, trace: &Trace, d_y: &[f32]) -> Result<Vec<f32>> {
        let (size, parameters) = (&self.size, &self.parameters);
        let mut gradient = vec![0.0; parameters.len()];
        let d_h = through_tanh(self.output.backward(parameters, &trace.h, d_y, &mut gradient), &trace.h);
        let d_joined = self.hidden.backward(parameters, &trace.joined, &d_h, &mut gradient);
        let halves = || d_joined.chunks(size.width());
        let mut d_e: Vec<f32> = halves().step_by(2).flatten().copied().collect();
        if let Some(mixer) = &self.mixer {
            let d_o: Vec<f32> = halves().skip(1).step_by(2).flatten().copied().collect();
            let start = Instant::now();
            let d_inputs = mixer.operator.backward(&d_o)?;
            self.device_time += start.elapsed();
            let (d_projected, d_beta) = d_inputs.split_at(3 * size.elements());
            for (projection, d) in mixer.projections.iter().zip(d_projected.chunks(size.elements())) {
                add(&mut d_e, &projection.backward(parameters, &trace.e, d, &mut gradient));
            }
            if let Some(layer) = &mixer.beta {
                let beta = &trace.inputs[3 * size.elements()..];
                // The derivative of the sigmoid.
                let d: Vec<f32> = d_beta.iter().zip(beta).map(|(d, beta)| d * beta * (1.0 - beta)).collect();
                let d = exchange(&d, size.heads, size.tokens);
                add(&mut d_e, &layer.backward(parameters, &trace.e, &d, &mut gradient));
            }
        }
        self.embed.backward(parameters, &batch.features, &through_tanh(d_e, &trace.e), &mut gradient);
        Ok(gradient)
    }
}

/// A dense layer x W + b; its parameters are a range of the model's: W `[inputs, outputs]`, then b.
struct Dense {
    inputs: usize,
    outputs: usize,
    start: usize,
}

impl Dense {
    fn parameters(&self) -> usize {
        (self.inputs + 1) * self.outputs
    }

    /// Weights of variance 1/inputs, no bias.
    fn initialize(&self, parameters: &mut [f32], rng: &mut Rng) {
        let bound = (3.0 / self.inputs as f32).sqrt();
        let weights = &mut parameters[self.start..][..self.inputs * self.outputs];
        weights.fill_with(|| bound * (2.0 * rng.f32() - 1.0));
    }

    fn forward(&self, parameters: &[f32], x: &[f32]) -> Vec<f32> {
        let (weights, bias) = parameters[self.start..][..self.parameters()].split_at(self.inputs * self.outputs);
        let mut y = bias.repeat(x.len() / self.inputs);
        for (x, y) in x.chunks(self.inputs).zip(y.chunks_mut(self.outputs)) {
            for (&x, weights) in x.iter().zip(weights.chunks(self.outputs)) {
                add_scaled(y, x, weights);
            }
        }
        y
    }

    /// The gradient of x; that of the parameters is added to its range of `gradient`.
    fn backward(&self, parameters: &[f32], x: &[f32], d_y: &[f32], gradient: &mut [f32]) -> Vec<f32> {
        let weights = &parameters[self.start..][..self.inputs * self.outputs];
        let gradient = &mut gradient[self.start..][..self.parameters()];
        let (d_weights, d_bias) = gradient.split_at_mut(self.inputs * self.outputs);
        let mut d_x = Vec::with_capacity(x.len());
        for (x, d_y) in x.chunks(self.inputs).zip(d_y.chunks(self.outputs)) {
            add(d_bias, d_y);
            let layers = weights.chunks(self.outputs).zip(d_weights.chunks_mut(self.outputs));
            for (&x, (weights, d_weights)) in x.iter().zip(layers) {
                add_scaled(d_weights, x, d_y);
                d_x.push(weights.iter().zip(d_y).map(|(w, d)| w * d).sum());
            }
        }
        d_x
    }
}

fn map(mut x: Vec<f32>, f: impl Fn(f32) -> f32) -> Vec<f32> {
    x.iter_mut().for_each(|x| *x = f(*x));
    x
}

fn add(to: &mut [f32], x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}

fn add_scaled(to: &mut [f32], factor: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

/// The gradient before a tanh whose result was y.
fn through_tanh(mut d: Vec<f32>, y: &[f32]) -> Vec<f32> {
    d.iter_mut().zip(y).for_each(|(d, y)| *d *= 1.0 - y * y);
    d
}

/// `[B, rows, columns]` as `[B, columns, rows]`.
fn exchange(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let matrix = |x: &[f32]| -> Vec<f32> { (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect() };
    x.chunks(rows * columns).flat_map(matrix).collect()
}

/// Adam (arXiv 1412.6980), the learning rate falling to zero in a straight line.
pub struct Adam {
    mean: Vec<f32>,
    square: Vec<f32>,
    step: i32,
    steps: usize,
}

impl Adam {
    const RATE: f32 = 1e-2;
    const DECAY: [f32; 2] = [0.9, 0.99];

    pub fn new(parameters: usize, steps: usize) -> Adam {
        Adam { mean: vec![0.0; parameters], square: vec![0.0; parameters], step: 0, steps }
    }

    pub fn update(&mut self, parameters: &mut [f32], gradient: &[f32]) {
        let rate = Self::RATE * (1.0 - self.step as f32 / self.steps as f32);
        self.step += 1;
        // Both averages start at zero; this undoes the bias.
        let unbias = Self::DECAY.map(|decay| 1.0 / (1.0 - decay.powi(self.step)));
        let averages = self.mean.iter_mut().zip(&mut self.square);
        for ((parameter, &gradient), (mean, square)) in parameters.iter_mut().zip(gradient).zip(averages) {
            *mean += (1.0 - Self::DECAY[0]) * (gradient - *mean);
            *square += (1.0 - Self::DECAY[1]) * (gradient * gradient - *square);
            *parameter -= rate * *mean * unbias[0] / ((*square * unbias[1]).sqrt() + 1e-8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::co2;
    use crate::data::{Data, rms};

    /// The whole model, operator on the device, against central differences of its loss.
    ///
    /// A loss of order 1 comes out of float32 with an error of about 1e-7; over ±1e-3 that makes the difference wrong
    /// by 1e-4. The third derivative adds 1e-6 of its size: little, save where DeltaNet normalises a short key.
    /// Measured are 1e-4 of the gradient's rms, and 3e-4 with DeltaNet. A forgotten path is off by 1e-1 or more.
    #[test]
    fn gradients_agree_with_finite_differences() {
        let gpu = Gpu::new().expect("the tests need an adapter");
        // More than one block of rows and more than one chunk, the last not full.
        let size = Size { batch: 2, tokens: 37, heads: 2, head_dim: 2 };
        let data = Data::new(co2::series().unwrap());
        let batch = data.training_batch(&mut Rng::with_seed(5), size.batch, size.tokens);
        for kind in [None].into_iter().chain(Kind::ALL.map(Some)) {
            let mut model = Model::new(&gpu, kind, size, 3).unwrap();
            // Away from the initial state, in which biases are zero.
            let mut rng = Rng::with_seed(4);
            model.parameters.iter_mut().for_each(|x| *x = 1.5 * *x + 0.3 * (rng.f32() - 0.5));
            let (_, gradient) = model.loss_and_gradient(&batch).unwrap();
            let step = 1e-3;
            let mut errors = Vec::new();
            for (index, &derivative) in gradient.iter().enumerate() {
                let original = model.parameters[index];
                let mut loss = |parameter: f32| {
                    model.parameters[index] = parameter;
                    let y = model.predict(&batch).unwrap();
                    rms(y.iter().zip(&batch.targets).map(|(&y, &target)| f64::from(y) - f64::from(target))).powi(2)
                };
                let (up, down) = (original + step, original - step);
                let difference = (loss(up) - loss(down)) / f64::from(up - down);
                model.parameters[index] = original;
                errors.push(f64::from(derivative) - difference);
            }
            let error = rms(errors.iter().copied()) / rms(gradient.iter().map(|&x| f64::from(x)));
            println!("{kind:?}: {error:.1e}");
            assert!(error < 2e-3, "{kind:?}: {error:.1e}");
        }
    }

    #[test]
    fn adam_finds_the_bottom_of_a_valley() {
        let mut parameters = [1.0, -1.0];
        let mut adam = Adam::new(2, 2000);
        for _ in 0..2000 {
            let gradient = [2.0 * (parameters[0] - 0.5), 200.0 * (parameters[1] - 0.25)];
            adam.update(&mut parameters, &gradient);
        }
        assert!((parameters[0] - 0.5).abs() < 1e-3 && (parameters[1] - 0.25).abs() < 1e-3, "{parameters:?}");
    }

    #[test]
    fn exchanging_twice_changes_nothing() {
        let x: Vec<f32> = (0..12).map(|x| x as f32).collect();
        assert_eq!(exchange(&x, 3, 2)[..6], [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        assert_eq!(exchange(&exchange(&x, 3, 2), 2, 3), x);
    }
}
