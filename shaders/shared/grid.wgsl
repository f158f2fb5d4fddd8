// Which workgroup this is. A dispatch of more than 65,535 workgroups is spread over two dimensions; the last row may
// hold some too many, so kernels return when the index is past their last.
fn workgroup_index(id: vec3<u32>, count: vec3<u32>) -> u32 {
    return id.y * count.x + id.x;
}
