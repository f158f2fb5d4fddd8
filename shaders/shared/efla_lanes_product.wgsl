// Products with COLUMNS columns whose sums stay in registers.

// Which columns j of a triangular left side count for a row.
const ALL: u32 = 0u;
const LOWER: u32 = 1u;
const STRICT_LOWER: u32 = 2u;
const UPPER: u32 = 3u;
const STRICT_UPPER: u32 = 4u;

fn counts(mask: u32, column: u32) -> vec4<bool> {
    let j = vec4(column);
    if mask == LOWER {
        return rows >= j;
    }
    if mask == STRICT_LOWER {
        return rows > j;
    }
    if mask == UPPER {
        return rows <= j;
    }
    if mask == STRICT_UPPER {
        return rows < j;
    }
    return vec4(true);
}

fn clear(sums: ptr<function, Sums>) {
//# for n in TILE
    (*sums)[$n] = vec4(0.0);
//# end
}

// sums += left x right  [CHUNK, count] x [count, COLUMNS], from column0 on. A kernel defines
// left_columns(part, j) -> columns j.. of the lane's rows of the left side, and load(part, row, column) for the right.
// What does not count is left out, not multiplied by 0: a later token's NaN may not reach a row.
fn add_product(sums: ptr<function, Sums>, left: u32, right: u32, count: u32, column0: u32, mask: u32) {
    var j = 0u;
    loop {
        let a = left_columns(left, j);
        let b = left_columns(left, j + 4u);
//# for m in a b
//# for j in x y z w
        let kept_$m$j = counts(mask, j + at_$m + at_$j);
//# end
//# end
        // A load before every 8 columns' sums: compilers take long over long stretches of code without a branch.
//# for c in 8
        let right$c = load(right, j + lane, column0 + 4u * $c);
//# for m in a b
//# for j in x y z w
        {
            let other = subgroupBroadcast(right$c, at_$m + at_$j);
//# for r in x y z w
            (*sums)[4u * $c + at_$r] += select(vec4(0.0), $m[at_$j] * other.$r, kept_$m$j);
//# end
        }
//# end
//# end
//# end
        continuing {
            j += LANES;
            break if j >= count;
        }
    }
}
