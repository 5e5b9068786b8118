package deploy_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// policed is the chart with its network policies.
const policed = `
metrics: {enabled: true}
networkPolicy:
  enabled: true
  rack: {cidrs: [192.0.2.10/32, "2001:db8::/64"], port: 8443}
  apiServer: {cidrs: [198.51.100.0/24]}
`

// reach is what a rule of a policy lets through: addresses, or "*" for all, and ports.
type reach struct {
	addresses []string
	ports     []int
}

func reachOf(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) reach {
	r := reach{addresses: []string{"*"}}
	if len(peers) > 0 {
		r.addresses = nil
	}
	for _, peer := range peers {
		if peer.IPBlock == nil {
			r.addresses = append(r.addresses, "pods")
			continue
		}
		r.addresses = append(r.addresses, peer.IPBlock.CIDR)
	}
	for _, port := range ports {
		r.ports = append(r.ports, port.Port.IntValue())
	}
	return r
}

func same(got, want []reach) bool {
	return slices.EqualFunc(got, want, func(a, b reach) bool {
		return slices.Equal(a.addresses, b.addresses) && slices.Equal(a.ports, b.ports)
	})
}

func TestAPolicyLetsThroughWhatThePodsNeed(t *testing.T) {
	apiServer := reach{[]string{"198.51.100.0/24"}, []int{6443}}
	rack := reach{[]string{"192.0.2.10/32", "2001:db8::/64"}, []int{8443}}
	names := reach{[]string{"*"}, []int{53, 53}}
	for _, c := range []struct {
		what, name, args string
		ingress, egress  []reach
	}{
		{"the controller", controllerName, "", []reach{{[]string{"*"}, []int{9809, 9812, 9813, 9814}}},
			[]reach{rack, apiServer, names}},
		{"a node", nodeName, "", []reach{{[]string{"*"}, []int{9810}}}, nil},
		{"a node that reads its Node", nodeName, "instanceMetadata: {enabled: true}",
			[]reach{{[]string{"*"}, []int{9810}}}, []reach{apiServer}},
		{"a node that may go", nodeName, "nodeKeeper: {enabled: true}",
			[]reach{{[]string{"*"}, []int{9810}}}, []reach{apiServer}},
		{"the node keeper", keeperName, "nodeKeeper: {enabled: true}",
			[]reach{{[]string{"*"}, []int{9815}}}, []reach{rack, apiServer, names}},
	} {
		t.Run(c.what, func(t *testing.T) {
			all := objects(t, append(values(t, policed), values(t, c.args)...)...)
			policy := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", c.name).Spec
			var ingress, egress []reach
			for _, rule := range policy.Ingress {
				ingress = append(ingress, reachOf(rule.From, rule.Ports))
			}
			for _, rule := range policy.Egress {
				egress = append(egress, reachOf(rule.To, rule.Ports))
			}
			if !same(ingress, c.ingress) || !same(egress, c.egress) || len(policy.PolicyTypes) != 2 {
				t.Errorf("%v lets in %v and out %v; want %v and %v", policy.PolicyTypes, ingress, egress,
					c.ingress, c.egress)
			}
			labels := pods(t, all)[c.name].Labels
			selected := policy.PodSelector
			if selected.MatchLabels[driverLabel] != labels[driverLabel] {
				t.Errorf("the policy is for %v, the pods have %v", selected, labels)
			}
			apps := []string{selected.MatchLabels["app"]}
			if len(selected.MatchExpressions) > 0 {
				apps = selected.MatchExpressions[0].Values
			}
			if !slices.Contains(apps, labels["app"]) {
				t.Errorf("the policy is for the apps %q, the pods have %v", apps, labels)
			}
		})
	}
}

func TestAPolicyWithoutMetricsLetsNothingIn(t *testing.T) {
	all := objects(t, append(values(t, policed), kept("metrics.enabled=false")...)...)
	for _, name := range []string{controllerName, nodeName, keeperName} {
		policy := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", name).Spec
		if len(policy.Ingress) > 0 || !slices.Contains(policy.PolicyTypes,
			networkingv1.PolicyTypeIngress) {
			t.Errorf("%s lets in %v, of %v", name, policy.Ingress, policy.PolicyTypes)
		}
	}
	if found := objects(t).kinds("NetworkPolicy"); len(found) > 0 {
		t.Errorf("by default there are the policies %v", found)
	}
}

func TestMetricsAreReadByThoseWhoMay(t *testing.T) {
	all := objects(t, append(values(t, policed), values(t,
		"networkPolicy: {metricsFrom: [{namespaceSelector: {matchLabels: {name: monitoring}}}]}")...)...)
	for _, name := range []string{controllerName, nodeName} {
		from := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", name).Spec.Ingress[0].From
		if len(from) != 1 || from[0].NamespaceSelector.MatchLabels["name"] != "monitoring" {
			t.Errorf("the metrics of %s are read from %v", name, from)
		}
	}
}

// The ports that kubelet probes need no rule: the pod's own node is never kept away.
func TestEveryPortOfMetricsIsInThePolicy(t *testing.T) {
	all := objects(t, append(everything(), values(t, policed)...)...)
	for name, pod := range pods(t, all) {
		ingress := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", name).Spec.Ingress
		open := reachOf(ingress[0].From, ingress[0].Ports).ports
		for _, c := range pod.Spec.Containers {
			for _, p := range c.Ports {
				if !slices.Contains(open, int(p.ContainerPort)) || p.Protocol != corev1.Protocol("") {
					t.Errorf("%s of %s has the port %v, open are %v", c.Name, name, p, open)
				}
			}
		}
	}
}
