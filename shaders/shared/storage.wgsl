// Decodes and encodes 16-bit elements, 4 at a time, each in the low half of a word. By integers: not every adapter has
// the built-in functions for f16, and none has any for bf16. Stores round to nearest even; a NaN stays a NaN.

fn decode_f16(halves: vec4<u32>) -> vec4<f32> {
    let magnitude = halves & vec4(0x7fffu);
    let exponent = halves & vec4(0x7c00u);
    // The exponent's bias grows from 15 to 127, and to 255 for what is not finite.
    let bits = (magnitude << vec4(13u)) + select(vec4(112u << 23u), vec4(224u << 23u), exponent == vec4(0x7c00u));
    // A subnormal's leading bit is implied by its exponent of 2⁻¹⁴ and taken away again.
    let subnormal = bitcast<vec4<f32>>(bits + vec4(1u << 23u)) - 6.103515625e-5;
    let magnitudes = select(bits, bitcast<vec4<u32>>(subnormal), exponent == vec4(0u));
    return bitcast<vec4<f32>>(magnitudes | ((halves & vec4(0x8000u)) << vec4(16u)));
}

fn encode_f16(x: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x);
    let magnitude = bits & vec4(0x7fffffffu);
    let normal = (magnitude + vec4(0xfffu) + ((magnitude >> vec4(13u)) & vec4(1u)) - vec4(112u << 23u)) >> vec4(13u);
    // ½ has the spacing of f16's subnormals in its last place: the sum rounds to them.
    let small = select(vec4(0u), magnitude, magnitude < vec4(0x38800000u));
    let subnormal = bitcast<vec4<u32>>(bitcast<vec4<f32>>(small) + 0.5) - vec4(0x3f000000u);
    var halves = select(normal, subnormal, magnitude < vec4(0x38800000u));
    // 65520 and more round to infinity.
    halves = select(halves, vec4(0x7c00u), magnitude >= vec4(0x477ff000u));
    halves = select(halves, vec4(0x7e00u), magnitude > vec4(0x7f800000u));
    return halves | ((bits >> vec4(16u)) & vec4(0x8000u));
}

fn decode_bf16(halves: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(halves << vec4(16u));
}

fn encode_bf16(x: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x);
    let rounded = (bits + vec4(0x7fffu) + ((bits >> vec4(16u)) & vec4(1u))) >> vec4(16u);
    let is_nan = (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u);
    return select(rounded, (bits >> vec4(16u)) | vec4(0x40u), is_nan);
}

// The words that hold 4 neighbours.
fn join_halves(halves: vec4<u32>) -> vec2<u32> {
    return halves.xz | (halves.yw << vec2(16u));
}

fn split_words(words: vec2<u32>) -> vec4<u32> {
    return vec4(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
}
