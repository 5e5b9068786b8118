package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// nodes collects the reports of the nodes, from files, or from the driver's pods.
func (g *gatherer) nodes(ctx context.Context) error {
	g.e.Nodes.Reports = map[string]inspection.Report{}
	for _, path := range g.options.NodeReports {
		data, err := readFile("--node-report", path, inspection.MaxBytes)
		if err != nil {
			return err
		}
		r, err := inspection.Parse(data)
		if err != nil {
			return fmt.Errorf("--node-report: %w", err)
		}
		g.e.Nodes.Reports[r.Instance] = g.trim(r)
	}
	switch {
	case len(g.options.NodeReports) > 0:
		g.e.Nodes.Unseen[""] = "no file of --node-report is of this node"
	case g.options.Objects != "" || !g.options.Kubectl:
		g.e.Nodes.Unseen[""] = "no node was asked; give its report with --node-report"
	default:
		g.askNodes(ctx)
	}
	return nil
}

// trim removes the volumes that the question is not about.
func (g *gatherer) trim(r inspection.Report) inspection.Report {
	if g.options.Question.Kind == AskNode {
		return r
	}
	asked := map[string]bool{}
	for _, c := range resolve(&g.e) {
		asked[c.handle] = true
	}
	var volumes []inspection.Volume
	for _, v := range r.Volumes {
		if asked[v.ID] {
			volumes = append(volumes, v)
		}
	}
	r.Volumes = volumes
	return r
}

// askNodes asks the node of each chain about the volumes that it is to have.
func (g *gatherer) askNodes(ctx context.Context) {
	type node struct {
		chain   *chain
		volumes []string
	}
	nodes := map[string]*node{}
	var order []*node
	for _, c := range resolve(&g.e) {
		if c.nodeName == "" {
			continue
		}
		n := nodes[c.nodeName]
		if n == nil {
			n = &node{chain: c}
			nodes[c.nodeName] = n
			order = append(order, n)
		}
		if _, ok := volume.ParseID(c.handle); !ok {
			continue
		}
		asked := "--volume=" + c.handle
		if name := c.diskName(); commandWord.MatchString(name) {
			asked += "=" + name
		}
		n.volumes = append(n.volumes, asked)
	}
	// Ask several nodes at once: a cluster may have many, and connecting takes most of the time.
	var mu sync.Mutex
	var asking sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, n := range order {
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			r, err := g.askNode(ctx, n.chain, n.volumes)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				g.e.Nodes.Unseen[n.chain.instance] = csierr.Plain(err.Error())
				return
			}
			g.e.Nodes.Reports[n.chain.instance] = r
		})
	}
	asking.Wait()
}

// askNode runs oxide-csi-plugin inspect in the driver's pod on a node.
func (g *gatherer) askNode(ctx context.Context, c *chain, volumes []string) (inspection.Report,
	error) {
	pod := c.driverPod(c.nodeName)
	if pod == nil {
		return inspection.Report{}, fmt.Errorf("%w: %s", errNoNode,
			cmp.Or(g.e.Cluster.Unseen[kindDriverPod], "no pod of the driver is on the node "+c.nodeName))
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	args := append([]string{"exec", "--namespace=" + pod.Metadata.Namespace, pod.Metadata.Name,
		"--container=" + driverContainer, "--", "/oxide-csi-plugin", "inspect"}, volumes...)
	data, err := g.Kubectl(ctx, args...)
	if err != nil {
		return inspection.Report{}, errors.New("kubectl exec: " + known(err.Error()))
	}
	r, err := inspection.Parse(data)
	if err != nil {
		return r, fmt.Errorf("the output of the pod %s %w", pod.Metadata.Name, err)
	}
	return r, nil
}
