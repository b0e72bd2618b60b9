"""Step time."""
from __future__ import annotations
import numpy as np
from harness.planner.stages import stages

def predict(shape, sequence, L, cluster, c):
    h, f, v = shape.hidden, shape.feed_forward, shape.vocabulary
    t = L.tensor.astype(float); d = L.data.astype(float)*L.context
    N = cluster.per_node
    nodes = np.maximum(1, -(-L.devices // N))
    tok = L.micro_batch*float(sequence)/L.context
    peak, bw = cluster.flops_per_second, cluster.memory_bytes_per_second
    def mm(m,k,n):
        return 2*m*k*n/(peak*c.matmul_efficiency)*(1+c.matmul_half_size*(1/m+1/k+1/n))
    aw, kv = shape.attention_width, shape.kv_width
    fwd = mm(tok,h,(aw+2*kv)/t)+mm(tok,aw/t,h)+mm(tok,h,(2 if shape.gated else 1)*f/t)+mm(tok,f/t,h)
    hs = -(-shape.head_size//64)*64 if shape.head_size!=96 else 128
    att = 2*tok*sequence*shape.heads*hs/t/(peak*c.attention_efficiency)
    ew = c.elementwise_passes*2*tok*(h+f)/t/bw
    layer = 3*fwd+3.5*att+ew
    head = 3*mm(tok,h,v/t)+c.logit_bytes*tok*v/t/bw
    # tensor comm
    intra_b = cluster.gather.at(np.ones_like(nodes)); inter = cluster.gather.at(nodes)*c.network_bandwidth
    spans = L.tensor > N
    tb = np.where(spans, np.minimum(inter, intra_b*c.tensor_bandwidth), intra_b*c.tensor_bandwidth)
    vol = 10*tok*h*2*(t-1)/t
    tl = np.where(spans, 10*(t/1)*c.tensor_latency, 0)
    tcomm = (vol/tb)*c.tensor_exposed
    gpu_layer = layer+tcomm
    crosses = (L.pipeline>1)&(nodes>1)
    floor = c.launch_layer+np.where(t>1,c.launch_tensor,0)+tl
    floor = floor + np.where(crosses&(t>1), c.pipeline_stall*t, 0)
    p2 = np.where(L.pipeline>1, 2*tok*h*2/t/(cluster.reduce.at(np.minimum(nodes,2))/N), 0)
    p2 = p2 + np.where(L.pipeline>1, 2*c.point_latency,0)
    tot=np.zeros(len(L)); mx=np.zeros(len(L)); pmax=np.zeros(len(L)); cnt=0
    for p in np.unique(L.pipeline):
        m=L.pipeline==p
        for st in stages(shape,int(p)):
            g=st.layers*gpu_layer[m]+st.head*head[m]
            fl=(st.layers+st.head*0.5)*floor[m]
            x=(g**6+fl**6)**(1/6)+p2[m]*(1 if p>1 else 0)
            tot[m]+=st.count*x; mx[m]=np.maximum(mx[m],x)
            pr=(st.layers*shape.layer_parameters+((st.embedding+st.head-(st.embedding and st.head and shape.tied)))*v*h)/t[m]
            pmax[m]=np.maximum(pmax[m],pr)
    pipe=tot+(L.accumulation-1)*mx
    # data
    g_per=np.minimum(L.data*L.context, np.maximum(1,N//np.minimum(L.tensor,N)))
    span_nodes=np.minimum(nodes,-(-(L.data*L.context*L.tensor)//N))
    isx=span_nodes>1
    rb=np.where(isx, cluster.reduce.at(nodes)*c.network_bandwidth*g_per/N, cluster.reduce.at(np.ones_like(nodes)))
    gb=np.where(isx, cluster.gather.at(nodes)*c.network_bandwidth*g_per/N, intra_b)
    ar=np.where(d>1, 2*(d-1)/d*4*pmax/rb,0)
    ag=np.where((d>1)&(L.zero>=1),(d-1)/d*2*pmax/gb,0)
    exposed=np.maximum(ar-c.data_overlap*mx*2/3, 0.0)+ag
    upd=pmax/np.where(L.zero>=1,d,1)*c.update_passes/bw
    total=(pipe+exposed+upd)*(1+c.straggler*np.log2(nodes))
    return total, dict(pipe=pipe,exposed=exposed,upd=upd,mx=mx,ar=ar,ag=ag)
