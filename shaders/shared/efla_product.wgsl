// Products of tiles, for the kernels that work on one chunk each. A workgroup has one chunk; an invocation has rows
// 4y..4y+3 and columns 4x..4x+3 of a [C, COLUMNS] product, or several such columns of a [C, C] product.
//
// A kernel says what it multiplies by defining load_left and load_right: (tile, part, row of the chunk, column) -> 4
// columns, 0 past any edge. `part` tells the products of one kernel apart.

const THREADS: u32 = CHUNK / 4u * VECTORS;
const BLOCKS: u32 = CHUNK / 4u;
// 4-column blocks of a C x C product that an invocation has.
const WIDE: u32 = (BLOCKS + VECTORS - 1u) / VECTORS;

// [C][COLUMNS]
var<workgroup> left: array<vec4<f32>, CHUNK * PITCH>;
// [C][COLUMNS] or [COLUMNS][COLUMNS]
var<workgroup> right: array<vec4<f32>, max(CHUNK, COLUMNS) * PITCH>;
// [C][C], transposed: [column][rows 4i..4i+3].
var<workgroup> matrix: array<vec4<f32>, CHUNK * BLOCKS>;

struct Tile {
    place: Place,
    // First token; first row in the workspace, whose chunks are whole; first row of the chunk's state.
    token0: u32,
    row0: u32,
    state0: u32,
    thread: u32,
    x: u32,
    y: u32,
}

fn tile_of(index: u32, thread: u32) -> Tile {
    let place = place_of_chunk(index);
    let token0 = (index - place.chunk0) * CHUNK;
    return Tile(place, token0, index * CHUNK, index * params.key_dim, thread, thread % VECTORS, thread / VECTORS);
}

// Which elements of a C x C product count.
const LOWER: u32 = 0u;
const STRICT_LOWER: u32 = 1u;
const UPPER: u32 = 2u;
const STRICT_UPPER: u32 = 3u;

// 4·WIDE columns of a C x C product: columns 4(x + VECTORS·n).. of rows 4y...
alias Wide = array<vec4<f32>, 4u * WIDE>;

// matrix ← mask(L Rᵀ)  [C, dim] x [dim, C], times D with DECAY. To be read behind a barrier.
fn multiply_rows(tile: Tile, part: u32, dim: u32, mask: u32) {
    let y = tile.y;
    let upper = mask >= UPPER;
    var product: Wide;
    rows_product(tile, part, dim, upper, &product);
    if DECAY == 1u {
        stage_kappas(tile.place, tile.token0, tile.thread);
    }
    // rows ≥, >, ≤, < column
    let rows = 4u * y + vec4(0u, 1u, 2u, 3u);
    let strict = mask % 2u;
    for (var n = 0u; n < WIDE; n++) {
        let block = tile.x + VECTORS * n;
        if DECAY == 1u && block < BLOCKS && select(block <= y, block >= y, upper) {
            let decay = decays(y, block);
            product[4u * n] *= decay[0];
            product[4u * n + 1u] *= decay[1];
            product[4u * n + 2u] *= decay[2];
            product[4u * n + 3u] *= decay[3];
        }
        for (var j = 0u; j < 4u && block < BLOCKS; j++) {
            let column = 4u * block + j;
            let kept = select(rows >= vec4(column + strict), rows + strict <= vec4(column), vec4(upper));
            matrix[column * BLOCKS + y] = select(vec4(0.0), product[4u * n + j], kept);
        }
    }
}

// product ← L Rᵀ  [C, dim] x [dim, C], in the blocks on and below, or on and above the diagonal.
fn rows_product(tile: Tile, part: u32, dim: u32, upper: bool, product: ptr<function, Wide>) {
    let x = tile.x;
    let y = tile.y;
    for (var i = 0u; i < 4u * WIDE; i++) {
        (*product)[i] = vec4(0.0);
    }
    for (var column0 = 0u; column0 < dim; column0 += COLUMNS) {
        workgroupBarrier();
        stage_left(tile, part, column0);
        stage_right(tile, part, column0);
        workgroupBarrier();
        for (var n = 0u; n < WIDE; n++) {
            let block = x + VECTORS * n;
            if block < BLOCKS && select(block <= y, block >= y, upper) {
                for (var c = 0u; c < VECTORS; c++) {
                    let l0 = left[(4u * y) * PITCH + c];
                    let l1 = left[(4u * y + 1u) * PITCH + c];
                    let l2 = left[(4u * y + 2u) * PITCH + c];
                    let l3 = left[(4u * y + 3u) * PITCH + c];
                    for (var j = 0u; j < 4u; j++) {
                        let r_j = right[(4u * block + j) * PITCH + c];
                        (*product)[4u * n + j] += vec4(dot(l0, r_j), dot(l1, r_j), dot(l2, r_j), dot(l3, r_j));
                    }
                }
            }
        }
    }
}

// With DECAY: (G, E) of rows 4y.. as columns.
fn row_decays(tile: Tile) -> mat2x4<f32> {
    let token = tile.token0 + 4u * tile.y;
    let d0 = load_decay(tile.place, token);
    let d1 = load_decay(tile.place, token + 1u);
    let d2 = load_decay(tile.place, token + 2u);
    let d3 = load_decay(tile.place, token + 3u);
    return mat2x4(vec4(d0.y, d1.y, d2.y, d3.y), vec4(d0.z, d1.z, d2.z, d3.z));
}

// left[i] ← the sum of rows 4i.. over all columns, from every invocation's own. To be called by all invocations.
fn sum_columns(tile: Tile, own: vec4<f32>) {
    workgroupBarrier();
    right[tile.thread] = own;
    workgroupBarrier();
    if tile.thread < BLOCKS {
        var sum = vec4(0.0);
        for (var x = 0u; x < VECTORS; x++) {
            sum += right[tile.thread * VECTORS + x];
        }
        left[tile.thread] = sum;
    }
    workgroupBarrier();
}

// Row r times factor[r].
fn scale_rows(sums: ptr<function, mat4x4<f32>>, factor: vec4<f32>) {
    let s = *sums;
    *sums = mat4x4(factor.x * s[0], factor.y * s[1], factor.z * s[2], factor.w * s[3]);
}

fn stage_left(tile: Tile, part: u32, column0: u32) {
    for (var i = tile.thread; i < CHUNK * VECTORS; i += THREADS) {
        let row = i / VECTORS;
        left[row * PITCH + i % VECTORS] = load_left(tile, part, row, column0 + 4u * (i % VECTORS));
    }
}

fn stage_right(tile: Tile, part: u32, column0: u32) {
    for (var i = tile.thread; i < CHUNK * VECTORS; i += THREADS) {
        let row = i / VECTORS;
        right[row * PITCH + i % VECTORS] = load_right(tile, part, row, column0 + 4u * (i % VECTORS));
    }
}

// sums += left x right  [C, COLUMNS] x [COLUMNS, COLUMNS]
fn add_product(tile: Tile, sums: ptr<function, mat4x4<f32>>) {
    for (var d = 0u; d < VECTORS; d++) {
        let r0 = right[(4u * d) * PITCH + tile.x];
        let r1 = right[(4u * d + 1u) * PITCH + tile.x];
        let r2 = right[(4u * d + 2u) * PITCH + tile.x];
        let r3 = right[(4u * d + 3u) * PITCH + tile.x];
        let l0 = left[(4u * tile.y) * PITCH + d];
        let l1 = left[(4u * tile.y + 1u) * PITCH + d];
        let l2 = left[(4u * tile.y + 2u) * PITCH + d];
        let l3 = left[(4u * tile.y + 3u) * PITCH + d];
        *sums += mat4x4(
            l0.x * r0 + l0.y * r1 + l0.z * r2 + l0.w * r3,
            l1.x * r0 + l1.y * r1 + l1.z * r2 + l1.w * r3,
            l2.x * r0 + l2.y * r1 + l2.z * r2 + l2.w * r3,
            l3.x * r0 + l3.y * r1 + l3.z * r2 + l3.w * r3,
        );
    }
}

// sums += left x rightᵀ  [C, COLUMNS] x [COLUMNS, COLUMNS]
fn add_product_transposed(tile: Tile, sums: ptr<function, mat4x4<f32>>) {
    for (var d = 0u; d < VECTORS; d++) {
        let r0 = right[(4u * tile.x) * PITCH + d];
        let r1 = right[(4u * tile.x + 1u) * PITCH + d];
        let r2 = right[(4u * tile.x + 2u) * PITCH + d];
        let r3 = right[(4u * tile.x + 3u) * PITCH + d];
        let l0 = left[(4u * tile.y) * PITCH + d];
        let l1 = left[(4u * tile.y + 1u) * PITCH + d];
        let l2 = left[(4u * tile.y + 2u) * PITCH + d];
        let l3 = left[(4u * tile.y + 3u) * PITCH + d];
        *sums += mat4x4(
            vec4(dot(l0, r0), dot(l0, r1), dot(l0, r2), dot(l0, r3)),
            vec4(dot(l1, r0), dot(l1, r1), dot(l1, r2), dot(l1, r3)),
            vec4(dot(l2, r0), dot(l2, r1), dot(l2, r2), dot(l2, r3)),
            vec4(dot(l3, r0), dot(l3, r1), dot(l3, r2), dot(l3, r3)),
        );
    }
}

// sums += matrix x right  [C, C] x [C, COLUMNS], whose matrix is lower or upper triangular. The zeros of a diagonal
// block are selected: a later token's NaN may not reach a row.
fn add_triangle(tile: Tile, mask: u32, sums: ptr<function, mat4x4<f32>>) {
    let upper = mask >= UPPER;
    let rows = 4u * tile.y + vec4(0u, 1u, 2u, 3u);
    let zero = vec4(0.0);
    let end = select(4u * tile.y + 4u, CHUNK, upper);
    for (var j = select(0u, 4u * tile.y, upper); j < end; j++) {
        let m_j = matrix[j * BLOCKS + tile.y];
        let value = right[j * PITCH + tile.x];
        let kept = select(rows >= vec4(j), rows <= vec4(j), vec4(upper));
        *sums += mat4x4(
            select(zero, m_j.x * value, kept.x),
            select(zero, m_j.y * value, kept.y),
            select(zero, m_j.z * value, kept.z),
            select(zero, m_j.w * value, kept.w),
        );
    }
}
