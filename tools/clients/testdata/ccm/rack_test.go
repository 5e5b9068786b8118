package provider

import (
	"os"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// TestNodesAndALoadBalancerWorkOnARack calls the cloud controller manager's functions for nodes and
// for a Service of type LoadBalancer.
func TestNodesAndALoadBalancerWorkOnARack(t *testing.T) {
	ctx := t.Context()
	client, err := oxide.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	project := os.Getenv("OXIDE_PROJECT")
	list, err := client.InstanceList(ctx,
		oxide.InstanceListParams{Project: oxide.NameOrId(project), SortBy: "name_ascending"})
	if err != nil || len(list.Items) < 2 {
		t.Fatalf("the rack has %v, and the test needs two instances: %v", list, err)
	}
	var nodes []*v1.Node
	for _, i := range list.Items[:2] {
		nodes = append(nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(i.Name)},
			Spec: v1.NodeSpec{ProviderID: NewProviderID(i.Id)}})
	}
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "6d0e0a40"},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeLoadBalancer, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyCluster, Ports: []v1.ServicePort{{Port: 80}}},
	}
	cluster := fake.NewClientset(nodes[0], nodes[1], service)
	instances := &InstancesV2{client: client, project: project}
	balancer := &LoadBalancer{client: client, project: project, k8sClient: cluster}

	done := 0
	step := func(name string, ok bool, err error) {
		t.Helper()
		if err != nil || !ok {
			t.Errorf("%s: answered %v, error %v", name, ok, err)
			return
		}
		done++
	}
	exists, err := instances.InstanceExists(ctx, nodes[0])
	step("InstanceExists", exists, err)
	shut, err := instances.InstanceShutdown(ctx, nodes[0])
	step("InstanceShutdown", !shut, err)
	metadata, err := instances.InstanceMetadata(ctx, nodes[0])
	step("InstanceMetadata", metadata != nil && len(metadata.NodeAddresses) > 0, err)
	status, err := balancer.EnsureLoadBalancer(ctx, "kubernetes", service, nodes[:1])
	step("EnsureLoadBalancer", status != nil && len(status.Ingress) > 0, err)
	step("UpdateLoadBalancer", true, balancer.UpdateLoadBalancer(ctx, "kubernetes", service, nodes[1:]))
	_, found, err := balancer.GetLoadBalancer(ctx, "kubernetes", service)
	step("GetLoadBalancer", found, err)
	step("EnsureLoadBalancerDeleted", true, balancer.EnsureLoadBalancerDeleted(ctx, "kubernetes", service))
	_, found, err = balancer.GetLoadBalancer(ctx, "kubernetes", service)
	step("GetLoadBalancer after the deletion", !found, err)
	t.Logf("STEPS %d of %d", done, 8)
}
